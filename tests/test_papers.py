"The list of papers: complete, found by every name, and with states that come from files."
import json, re, subprocess, sys
from pathlib import Path
import pytest
from rlworkbench.papers import CHAPTERS, PAPERS, STAGES, State, find_root, markdown_table, paper, state

ROOT = Path(__file__).parent.parent

def _project(folder, notebooks=(), results=None):
    (folder/"nbs").mkdir(); (folder/"results").mkdir(); (folder/"settings.ini").touch()
    for key in notebooks: (folder/f"nbs/{key}.ipynb").write_text("{}")
    for key, stored in (results or {}).items(): (folder/f"results/{key}.json").write_text(stored if isinstance(stored, str) else json.dumps(stored))
    return folder

def test_thirty_papers_between_three_opening_chapters_and_one_that_joins_them():
    assert sorted(p.number for p in CHAPTERS+PAPERS) == list(range(34)) and [p.number for p in CHAPTERS] == [0, 1, 2, 33]
    assert len({p.slug for p in CHAPTERS+PAPERS}) == len({p.name for p in CHAPTERS+PAPERS}) == 34
    assert list(STAGES) == ["prepare", "curriculum", "sampler", "rewards", "advantages", "select", "token_loss", "auxiliary_loss", "after_update"]
    for p in PAPERS:
        assert re.fullmatch(r"2605\.\d{5}", p.arxiv) and re.fullmatch(r"[a-z][a-z0-9_]*", p.slug)
        assert p.home in p.stages and list(p.stages) == [s for s in STAGES if s in p.stages]
        assert p.sentence.endswith(".") and p.sentence.count(".") == 1 and "|" not in p.sentence+p.title
    assert len({p.arxiv for p in PAPERS}) == 30
    assert {s for p in PAPERS for s in p.stages} == set(STAGES)

@pytest.mark.parametrize("key", [p.key for p in CHAPTERS+PAPERS])
def test_every_name_finds_its_paper(key):
    p = next(p for p in CHAPTERS+PAPERS if p.key == key)
    for name in (p.number, str(p.number), f"{p.number:02d}", p.slug, p.key, p.name, p.name.upper(), p.notebook, p.results, Path(p.notebook), f" {p.slug} "):
        assert paper(name) is p

@pytest.mark.parametrize("asked, near", [("esppo", "07_espo"), ("verigat", "06_verigate"), ("off_policy", "22_off_policy_pessimism"), ("34", "00_worlds to 33_compose"), ("zzz", "00_worlds to 33_compose"), (-1, "known are")])
def test_unknown_names_list_what_is_near(asked, near):
    with pytest.raises(ValueError, match=near) as e: paper(asked)
    assert repr(str(asked)) in str(e.value)

def test_state_comes_from_files(tmp_path):
    root = _project(tmp_path, ["07_espo", "06_verigate", "02_grpo"], {
        "07_espo": dict(scale="claim", minutes=31.5, claims=[dict(verdict="holds"), dict(verdict="holds"), dict(verdict="undecided")]),
        "06_verigate": dict(claims=[dict(verdict="does not hold here")]), "19_reft": dict(claims=[dict(verdict="holds")])})
    espo = state("espo", root)
    assert espo == State(True, ("holds", "holds", "undecided"), "claim", 31.5)
    assert str(espo) == "ready: holds (2 of 3), undecided (1 of 3)"
    assert str(state(6, root)) == "ready: does not hold here"
    assert str(state("grpo", root)) == "ready" and state("grpo", root).verdict is None
    assert str(state("reft", root)) == "planned"       # results whose chapter is gone count for nothing
    assert state(paper("slat"), root) == State(False)

@pytest.mark.parametrize("stored", ["{", "[]", '{"claims": [{"text": "x"}]}', '{"claims": 3}'])
def test_a_damaged_results_file_is_named(tmp_path, stored):
    root = _project(tmp_path, ["07_espo"], {"07_espo": stored})
    with pytest.raises(ValueError, match="07_espo.json is no results file.*run nbs/07_espo.ipynb again"): state("espo", root)

def test_root_is_found_from_below_and_from_elsewhere(tmp_path, monkeypatch):
    root = _project(tmp_path)
    (root/"nbs/core").mkdir()
    monkeypatch.chdir(root/"nbs/core")
    assert find_root() == root.resolve() and str(state("espo")) == "planned"
    assert find_root(ROOT/"nbs") == ROOT

def test_readme_table(tmp_path):
    root = _project(tmp_path, ["07_espo"], {"07_espo": dict(claims=[dict(verdict="undecided")])})
    lines = markdown_table(root).split("\n")
    assert len(lines) == 32 and {line.count("|") for line in lines} == {6}
    assert lines[6].startswith("| 07 | [ESPO](nbs/07_espo.ipynb) ([2605.29860](https://arxiv.org/abs/2605.29860)) |") and lines[6].endswith("| ready: undecided |")
    assert "[SLAT](" not in lines[3] and lines[3].endswith("| planned |")     # no link to a notebook that is not there
    assert markdown_table(root, [paper(2)], link="../").count("\n") == 2

def test_import_is_light():
    loaded = subprocess.run([sys.executable, "-c", "import sys, rlworkbench.papers; print(*[m for m in ('torch', 'numpy', 'matplotlib', 'trl') if m in sys.modules])"], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == ""

def test_the_stages_of_a_finished_method_are_in_its_code():
    method = pytest.importorskip("rlworkbench.method")
    import importlib, inspect
    assert tuple(STAGES) == method.STAGES              # `papers` keeps its own list, so that `rlw list` need not import torch
    found = 0
    for p in PAPERS:
        if not (ROOT/"rlworkbench/methods"/f"{p.slug}.py").exists(): continue
        module = importlib.import_module(p.module); found += 1
        classes = [c for _, c in inspect.getmembers(module, inspect.isclass) if issubclass(c, method.Method) and c.__module__ == module.__name__]
        changed = {s for c in classes for s in STAGES if getattr(c, s) is not getattr(method.Method, s)}
        assert set(p.stages) <= changed, f"{p.name}: the table says {p.stages}, the code changes {sorted(changed)}"
    assert found == len(list((ROOT/"rlworkbench/methods").glob("[a-z]*.py")))   # every method is in the table
