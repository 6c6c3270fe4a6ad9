"""Backends: the same small protocol for CPU threads, accelerators and simulated devices."""
