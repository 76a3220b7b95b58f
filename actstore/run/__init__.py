"""A store around the forwards of a script that runs unchanged: ``actstore run``."""
