from tests.contracts.clean import all_freed

__all__ = ["all_freed"]
