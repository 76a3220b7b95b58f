"""Training runs side by side: stores and peers on one workload."""
