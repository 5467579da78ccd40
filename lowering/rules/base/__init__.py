"""What rules are made of: their context, composition of other primitives, and the fallback to one tile."""
