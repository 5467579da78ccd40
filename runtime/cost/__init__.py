"""Cycles of one step: compute sets, copies between tiles and IPUs, and copies between replicas."""
