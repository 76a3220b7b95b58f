"""Facts about this machine that decide what actstore does on it: `actstore doctor` shows them."""
