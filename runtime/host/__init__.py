"""What answers the host transfers of a program, and processes that share its replicas."""
