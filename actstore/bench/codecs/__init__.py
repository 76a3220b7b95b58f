"""``actstore bench codecs``: ratio, speed and error of the codecs on synthetic activations."""
