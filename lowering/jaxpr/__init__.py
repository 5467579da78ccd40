"""What is read from a jaxpr: stages of equations, nested jaxprs, and counts of operations."""
