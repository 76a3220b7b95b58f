"""Saved-tensor hooks: the tensors that autograd saves, and the handles that bring them back."""
