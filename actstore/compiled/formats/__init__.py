"""Codecs as operators of a graph: a payload is one tensor for each section of the codec's format."""
