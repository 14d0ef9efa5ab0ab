from flashtri_core.testing.plugin import (
    own_tuning_table,
    poisoned,
    pytest_collection_modifyitems,
    pytest_runtest_setup,
    roomy,
)

__all__ = ["own_tuning_table", "poisoned", "pytest_collection_modifyitems", "pytest_runtest_setup", "roomy"]
