"""Facts about a program: effects of its steps, live ranges, values that may differ between replicas."""
