"""One batch into microbatches, and what they give back into one value."""
