"""Loss scaling for fp16: torch's arithmetic, with steps in other threads and an update that is awaited."""
