"""Pictures: what they have in common, and bars of where bytes wait. They need matplotlib (the extra `bench`)."""
