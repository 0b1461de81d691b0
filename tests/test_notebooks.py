"Every notebook runs at `smoke` scale, headless, from a folder that is not its own and has an awkward name."
import json, re, subprocess, sys, time

import pytest

from conftest import ROOT
from rlworkbench.notebooks import WIDGET, known_parameters, list_notebooks
from rlworkbench.papers import CHAPTERS, PAPERS

NOTEBOOKS = list_notebooks(ROOT)
CHAPTER_KEYS = {p.key for p in [*CHAPTERS, *PAPERS]}

def panels_without_a_still(cells):
    "Numbers of cells whose widget has no figure or table with it or in the next cell that shows something (W3)."
    def still(outputs): return any({"image/png", "image/svg+xml", "text/html"} & set(o.get("data", {})) for o in outputs)
    shows = [(i, c["outputs"]) for i, c in enumerate(cells) if c.get("outputs")]
    missing = []
    for n, (i, outputs) in enumerate(shows):
        widgets = [o for o in outputs if WIDGET in o.get("data", {}) and "it/s" not in str(o["data"].get("text/plain")) and "%|" not in str(o["data"].get("text/plain"))]
        if widgets and not still(outputs) and not (n + 1 < len(shows) and still(shows[n + 1][1])): missing.append(i)
    return missing

@pytest.mark.timeout(180)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=[p.relative_to(ROOT / "nbs").as_posix() for p in NOTEBOOKS])
def test_notebook_runs_at_smoke_scale(path, tmp_path, record_property):
    from rlworkbench.kernels import execute
    folder = tmp_path / "my runs" / "é 1"; folder.mkdir(parents=True)
    parameters = {k: v for k, v in dict(scale="smoke", out=str(folder / "out")).items() if k in known_parameters(path)}
    began = time.monotonic()
    outcome = execute(path, folder / path.name, parameters, cwd=folder, project=ROOT)
    seconds = time.monotonic() - began
    record_property("seconds", round(seconds, 1))
    print(f"{path.name}: {seconds:.0f} s")
    assert outcome.ok, f"{outcome.error}\n{outcome.report}"
    assert outcome.package == str(ROOT / "rlworkbench/__init__.py")              # n7: one copy of the package
    cells = json.loads((folder / path.name).read_text(encoding="utf-8"))["cells"]
    assert panels_without_a_still(cells) == []

@pytest.mark.timeout(300)
@pytest.mark.parametrize("output", [["my out/07 espo.ipynb"], []], ids=["a path with spaces", "no output path"])
def test_espo_runs_by_the_papermill_command_from_another_folder(output, tmp_path):
    (tmp_path/"my out").mkdir()
    command = [sys.executable, "-m", "papermill", str(ROOT/"nbs"/"07_espo.ipynb"), *output, "-p", "scale", "smoke", "-p", "seed", "3", "--no-progress-bar"]
    run = subprocess.run(command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    cells = json.loads((tmp_path/output[0]).read_text(encoding="utf-8") if output else run.stdout)["cells"]    # without a path papermill prints the notebook
    assert not any(o["output_type"] == "error" for c in cells for o in c.get("outputs", []))
    found = json.loads((tmp_path/"runs"/"07_espo.json").read_text(encoding="utf-8"))
    assert found["seeds"] == [3] and found["scale"] == "smoke" and list(found["arms"]) == ["PPO", "ESPO"]

@pytest.mark.parametrize("path", [p for p in NOTEBOOKS if p.stem in CHAPTER_KEYS], ids=lambda p: p.stem)
def test_chapter_has_the_four_parameters_first(path):
    code = [c for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
    assert code[0]["metadata"].get("tags") == ["parameters"] and not re.search(r"^#\| *export", "".join(code[0]["source"]), re.M)
    assert list(known_parameters(path)) == ["scale", "seed", "model", "out"]

def test_w3_a_panel_without_a_still_is_found():
    widget = {"data": {WIDGET: {}, "text/plain": "VBox(children=())"}}
    figure = {"data": {"image/png": "", "text/plain": "<Figure>"}}
    bar = {"data": {WIDGET: {}, "text/plain": "  0%|          | 0/20 [00:00<?, ?it/s]"}}
    assert panels_without_a_still([{"outputs": [widget]}]) == [0]
    assert panels_without_a_still([{"outputs": [widget, figure]}, {"outputs": [bar]}, {}, {"outputs": [widget]}, {"outputs": []}, {"outputs": [figure]}]) == []
