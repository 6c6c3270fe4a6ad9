"""Which layers form a stage and which device runs which stage when: decided, printed and simulated without a device."""
