from flashtri_core.testing.plugin import (
    gpu_turn,
    own_tuning_table,
    poisoned,
    pytest_collection_modifyitems,
    pytest_runtest_setup,
    roomy,
    sm90,
)

__all__ = [
    "gpu_turn",
    "own_tuning_table",
    "poisoned",
    "pytest_collection_modifyitems",
    "pytest_runtest_setup",
    "roomy",
    "sm90",
]
