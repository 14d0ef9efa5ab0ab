from flashtri_bench.plugin import bench_session, measured, pytest_addoption

__all__ = ["bench_session", "measured", "pytest_addoption"]
