"What all tests have in common: one thread each, no network, a cache of their own, small notebooks to run."
import os, tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")    # before torch is imported: pytest-xdist starts two of us
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1", MPLBACKEND="Agg")
if "RLWORKBENCH_CACHE" not in os.environ:        # workers inherit the one that the first process makes
    _cache = tempfile.TemporaryDirectory(prefix="rlworkbench-tests-")
    os.environ["RLWORKBENCH_CACHE"] = _cache.name

import pytest

ROOT = Path(__file__).resolve().parent.parent

def pytest_configure(config):
    try: import torch
    except ImportError: return
    torch.set_num_threads(1)

def pytest_collection_modifyitems(config, items):
    import torch
    slow = pytest.mark.skip(reason="slow: set RLWORKBENCH_SLOW=1 to run it")
    gpu = pytest.mark.skip(reason="needs a GPU, and torch sees none")
    for item in items:
        if "slow" in item.keywords and os.environ.get("RLWORKBENCH_SLOW") != "1": item.add_marker(slow)
        if "gpu" in item.keywords and not torch.cuda.is_available(): item.add_marker(gpu)

@pytest.fixture(scope="session")
def root():
    "The checkout."
    return ROOT

@pytest.fixture
def checkout(tmp_path):
    "A small project of its own, in a folder with an awkward name."
    folder = tmp_path / "my runs" / "é 1"
    (folder / "nbs").mkdir(parents=True)
    (folder / "settings.ini").touch()
    return folder

@pytest.fixture
def make_notebook(checkout):
    "Writes a notebook into that project; the cell that starts with `#parameters` is its parameters cell."
    from rlworkbench.notebooks import write_notebook
    def make(name, *sources, kernel="python3"):
        cells = []
        for i, text in enumerate(sources):
            if text.startswith("!"): cells.append(dict(cell_type="markdown", id=f"c{i}", metadata={}, source=text[1:].strip()))
            else: cells.append(dict(cell_type="code", id=f"c{i}", metadata=dict(tags=["parameters"]) if text.startswith("#parameters") else {},
                                    source=text, outputs=[], execution_count=None))
        path = checkout / "nbs" / f"{name}.ipynb"
        write_notebook(dict(cells=cells, metadata=dict(kernelspec=dict(name=kernel, display_name=kernel, language="python")), nbformat=4, nbformat_minor=5), path)
        return path
    return make
