"Notebooks side by side: torch, a process pool, and settings that must not reach the next one."
from concurrent.futures import ProcessPoolExecutor
import multiprocessing, time
import pytest

POOL = """import time, torch
from concurrent.futures import ProcessPoolExecutor
torch.set_default_dtype(torch.float64); torch.manual_seed(7)
import fractions; fractions.touched = True
x = torch.ones(200, 200) @ torch.ones(200, 200)
with ProcessPoolExecutor(2) as pool: squares = list(pool.map(pow, range(50), [2]*50))
assert squares[-1] == 2401 and x[0, 0] == 200"""
PLAIN = """import torch, fractions
assert torch.get_default_dtype() == torch.float32 and not hasattr(fractions, "touched")
assert torch.initial_seed() != 7"""

def run(path):
    from rlworkbench.kernels import execute
    outcome = execute(path, path.with_name(f"out {path.name}"), {}, cwd=path.parent)
    return outcome.ok, str(outcome.error)

@pytest.mark.timeout(300)
def test_n10_notebooks_side_by_side_finish_and_leave_nothing_to_one_another(checkout, make_notebook):
    paths = [make_notebook("pool", POOL), make_notebook("plain", PLAIN)]
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as workers:
        for _ in range(3):
            began = time.monotonic()
            assert list(workers.map(run, paths)) == [(True, "")]*2
            assert time.monotonic() - began < 90                     # a limit against hanging, not a measurement
