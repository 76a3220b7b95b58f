"""The policy "bits": measured payloads, and the fewest bits for a bound on the noise of gradients."""
