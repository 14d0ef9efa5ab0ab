"""The packages are released in lockstep, ship what they promise, and ask for torch alone (and Triton on Linux)."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = {path.name: path for path in sorted((ROOT / "packages").iterdir())}
PROJECTS = {name: tomllib.loads((path / "pyproject.toml").read_text()) for name, path in PACKAGES.items()}


def test_packages_are_the_three_of_the_readme():
    assert set(PACKAGES) == {"core", "modules", "bench"}


@pytest.mark.parametrize("name", PACKAGES)
def test_one_version(name):
    project = PROJECTS[name]["project"]
    assert project["version"] == PROJECTS["core"]["project"]["version"]
    siblings = [word for word in project["dependencies"] if word.startswith("flashtri-")]
    assert all(word.endswith(f"=={project['version']}") for word in siblings), siblings


def test_the_changelog_knows_the_version():
    assert f"## {PROJECTS['core']['project']['version']}" in (ROOT / "CHANGELOG.md").read_text()


def test_core_needs_torch_and_on_linux_triton():
    names = {re.split(r"[<>=;\s]", word)[0]: word for word in PROJECTS["core"]["project"]["dependencies"]}
    assert set(names) == {"torch", "triton"}
    assert names["triton"].endswith("; platform_system == 'Linux'")


def test_modules_need_core_alone():
    assert [word.split("==")[0] for word in PROJECTS["modules"]["project"]["dependencies"]] == ["flashtri-core"]


@pytest.mark.parametrize("name", PACKAGES)
def test_every_import_package_is_typed_and_in_the_wheel(name):
    found = sorted(f"src/{path.parent.name}" for path in (PACKAGES[name] / "src").glob("*/__init__.py"))
    wheel = PROJECTS[name]["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert sorted(wheel) == found
    for package in found:
        assert (PACKAGES[name] / package / "py.typed").exists(), f"{package} has no py.typed"


@pytest.mark.parametrize("name", PACKAGES)
def test_licence_is_the_root_s(name):
    assert (PACKAGES[name] / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_oldest_versions_tested_are_the_oldest_allowed():
    pins = dict(
        line.split("==") for line in (ROOT / "constraints-minimums.txt").read_text().splitlines() if "==" in line
    )
    for word in PROJECTS["core"]["project"]["dependencies"]:
        name, lowest = re.match(r"(\w+)>=([\d.]+)", word).groups()
        assert pins[name].startswith(lowest), f"{word} allows a version that `nox -s minimums` does not test"


def imports(path):
    """Names of the modules that a file imports, relative ones made absolute, inside functions too."""
    package = path.relative_to(ROOT / "packages" / "core" / "src").with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


# What each part of the core may not know: the arrows of the architecture, as their complement.
FORBIDDEN = {
    "kernels/softmax.py": r"flashtri_core\.(?!_jit)",
    "kernels/": r"flashtri_core\.(reference|interface|ops|dispatch)\b",
    "variants/": r"flashtri_core\.(kernels|reference|interface|ops|tuning|target)\b",
    "reference.py": r"flashtri_core\.(kernels|interface|ops|tuning|target)\b|triton",
    "": r"flashtri_(modules|bench)\b|flash_attn_triton",
}


@pytest.mark.parametrize("place", FORBIDDEN)
def test_import_arrows(place):
    core = ROOT / "packages" / "core" / "src" / "flashtri_core"
    files = [path for path in core.rglob("*.py") if path.relative_to(core).as_posix().startswith(place)]
    assert files, f"nothing lies under {place}"
    wrong = [f"{path.name}: {name}" for path in files for name in imports(path) if re.match(FORBIDDEN[place], name)]
    assert not wrong


def test_gluon_stays_in_the_hopper_folder():
    core = ROOT / "packages" / "core" / "src" / "flashtri_core"
    outside = [path for path in core.rglob("*.py") if "hopper" not in path.parts]
    assert not [path for path in outside if any("triton.experimental" in name for name in imports(path))]


def run_python(code):
    """Output of `code` in a new Python that does not see this process's modules."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_hopper_launchers_import_no_kernel_that_few_calls_need():
    """Each file of kernels takes the first call of every process 15 ms: Triton reads its source."""
    pytest.importorskip("triton", reason="Triton is not installed")
    code = "import flashtri_core.kernels.hopper.launch_backward as launch, sys; print(*sys.modules)"
    loaded = {name.partition(".kernels.")[2] for name in run_python(code).split()}
    assert {"hopper.forward", "hopper.backward"} <= loaded
    assert not loaded & {"launch", "forward", "backward", "hopper.backward_wide", "hopper.backward_split"}


NO_TRITON = "import sys; sys.modules['triton'] = None\n"  # makes every `import triton` an ImportError


def test_import_needs_no_triton():
    assert run_python(NO_TRITON + "import flashtri_core, flashtri_modules, flash_attn_triton; print('fine')") == "fine"


def test_cpu_path_works_without_triton():
    """Guards the macOS and Windows installs: forward and backward on CPU tensors, no Triton in sight."""
    code = """
import torch
from flashtri_core import flash_attn
q, k, v = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3))
want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
got = flash_attn(q, k, v, causal=True)
torch.testing.assert_close(got, want)
do = torch.randn_like(got)
for a, b in zip(torch.autograd.grad(got, (q, k, v), do), torch.autograd.grad(want, (q, k, v), do), strict=True):
    torch.testing.assert_close(a, b)
print("fine")
"""
    assert run_python(NO_TRITON + code) == "fine"


def test_import_registers_what_torch_counts_and_brings_nothing_heavy():
    """A millisecond's import of torch's; SymPy alone would be 0.3 s of the first call."""
    code = """
import sys, torch
before = set(sys.modules)
import flashtri_core
from torch.utils.flop_counter import FlopCounterMode, flop_registry
print(torch.ops.flashtri.fwd in flop_registry, torch.ops.flashtri.bwd in flop_registry)
print(sorted({name for name in {"sympy", "torch._dynamo", "torch._inductor"} if name in sys.modules}))
"""
    assert run_python(code).split("\n") == ["True True", "[]"]


def test_import_is_quiet_where_torch_would_log_that_triton_is_missing():
    """torch for CUDA on Windows: the import neither logs nor brings the module that does."""
    code = """
import os, sys
os.dup2(1, 2)
import torch
torch.version.cuda = "13.0"
import flashtri_core
print("torch.utils.flop_counter" in sys.modules)
"""
    assert run_python(NO_TRITON + code) == "False"


def test_import_initialises_no_cuda():
    assert run_python("import flashtri_core, torch; print(torch.cuda.is_initialized())") == "False"


def test_the_usage_line_of_the_facade():
    code = """
import torch
from flash_attn_triton import flash_attn, FlashSelfAttention
q = k = v = torch.randn(2, 4, 16, 8)
out = flash_attn(q, k, v, causal=True)
attn = FlashSelfAttention(embed_dim=1024, num_heads=16, causal=True)
print(tuple(out.shape), tuple(attn(torch.randn(1, 7, 1024)).shape))
"""
    assert run_python(code) == "(2, 4, 16, 8) (1, 7, 1024)"


def test_readme_code_runs():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert blocks
    run_python("\n".join(blocks))


def test_versions_agree_with_the_code():
    code = "import flashtri_core; print(flashtri_core.__version__)"
    assert run_python(code) == PROJECTS["core"]["project"]["version"]
