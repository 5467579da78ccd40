"""Arguments of a call: their checks, differences of pytrees, and how `in_specs` split them over replicas."""
