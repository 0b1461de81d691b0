"The order of the house: package and notebooks agree, notebooks are clean, floors hold, pins stand."
import base64, copy, importlib, json, os, re, shutil, subprocess, sys
from configparser import ConfigParser
from importlib.metadata import version
from pathlib import Path

import pytest

from conftest import ROOT
from rlworkbench.notebooks import BAR, PLACE, TIMING, WIDGET, list_notebooks, readme, source
from rlworkbench.papers import CHAPTERS, PAPERS

NOTEBOOKS = list_notebooks(ROOT)
IDS = [p.relative_to(ROOT / "nbs").as_posix() for p in NOTEBOOKS]
BIN = Path(sys.executable).parent
KEPT = {"kernelspec": {"display_name": "python3", "language": "python", "name": "python3"}}

def load(path): return json.loads(path.read_text(encoding="utf-8"))

def tracked():
    "Text files of the repository."
    r = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if r.returncode: pytest.skip("no git repository here")
    for name in filter(None, r.stdout.split("\0")):
        path = ROOT / name
        if path.is_file():
            try: yield path, path.read_text(encoding="utf-8")
            except UnicodeDecodeError: pass

# ---- package and notebooks

def export_problems(notebooks):
    "Export cells that lead nowhere: `{name: [message]}` (N8)."
    homes, wants, problems = set(), [], []
    for name, nb in notebooks.items():
        texts = [source(c) for c in nb["cells"] if c["cell_type"] == "code"]
        home = [m for t in texts for m in re.findall(r"^#\|\s*default_exp\s+(\S+)", t, re.M)]
        homes |= set(home)
        if len(home) > 1: problems.append(f"{name}: more than one default_exp")
        for t in texts:
            for m in re.finditer(r"^#\|\s*(?:export|exporti|exports)(?:[ \t]+(\S+))?[ \t]*$", t, re.M):
                if m[1]: wants.append((name, m[1]))
                elif not home: problems.append(f"{name}: an export cell, but no default_exp says where to")
    return problems + [f"{name}: exports to {target}, which no notebook owns" for name, target in wants if target not in homes]

def test_n8_every_export_has_a_target(): assert export_problems({n: load(p) for n, p in zip(IDS, NOTEBOOKS)}) == []

def test_n8_an_export_without_target_is_named():
    cell = lambda text: {"cell_type": "code", "source": [text]}
    made = {"a.ipynb": {"cells": [cell("#| export\nx = 1")]}, "b.ipynb": {"cells": [cell("#| default_exp b"), cell("#| export other\nx = 1"), cell("#| exporti\ny = 1")]}}
    assert export_problems(made) == ["a.ipynb: an export cell, but no default_exp says where to", "b.ipynb: exports to other, which no notebook owns"]

def fresh_export(folder, nbs):
    "Export all notebooks below `nbs` into a project of its own; returns its package."
    shutil.copytree(nbs, folder / "nbs", ignore=shutil.ignore_patterns(".*", "runs"))
    shutil.copy(ROOT / "settings.ini", folder)
    (folder / "rlworkbench").mkdir()
    code = "import sys; from pathlib import Path; from nbdev.export import nb_export\nfor p in sorted(Path('nbs').rglob('*.ipynb')): nb_export(str(p), 'rlworkbench')"
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True)
    return folder / "rlworkbench"

def differences(package, fresh):
    "Modules that are not what the notebooks give."
    def modules(folder): return {p.relative_to(folder).as_posix(): p.read_text(encoding="utf-8") for p in folder.rglob("*.py") if p.name not in ("__init__.py", "_modidx.py")}
    here, there = modules(package), modules(fresh)
    return [f"rlworkbench/{n} and its notebook differ: edit the notebook and export it" if n in here and n in there else
            f"rlworkbench/{n} has no notebook" if n in here else f"rlworkbench/{n} was never exported" for n in sorted(here.keys() | there.keys()) if here.get(n) != there.get(n)]

def test_n11_package_equals_a_fresh_export(tmp_path):
    fresh = fresh_export(tmp_path, ROOT / "nbs")
    assert differences(ROOT / "rlworkbench", fresh) == []
    folders = {p.parent for p in (ROOT / "rlworkbench").rglob("*.py")}
    assert [f for f in folders if not (f / "__init__.py").exists()] == []

def test_n11_a_module_edited_by_hand_is_named(tmp_path):
    fresh = fresh_export(tmp_path, ROOT / "nbs")
    edited = tmp_path / "edited"
    shutil.copytree(fresh, edited)
    (edited / "papers.py").write_text((edited / "papers.py").read_text() + "\nx = 1\n")
    assert differences(edited, fresh) == ["rlworkbench/papers.py and its notebook differ: edit the notebook and export it"]

MODULES = sorted(p.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for p in (ROOT / "rlworkbench").rglob("*.py") if p.name[0] != "_")

@pytest.mark.parametrize("module", MODULES)
def test_n8_every_exported_name_is_importable(module):
    m = importlib.import_module(module)
    assert m.__doc__ and [n for n in m.__all__ if not hasattr(m, n)] == []

def test_n7_the_tests_see_the_projects_package():
    import rlworkbench
    assert Path(rlworkbench.__file__).resolve() == ROOT / "rlworkbench/__init__.py", "another copy of the package is installed: pip install -e ."

def test_importing_the_package_is_quick():
    code = "import time; t = time.perf_counter(); import rlworkbench; print(time.perf_counter() - t)"
    assert min(float(subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout) for _ in range(3)) < .3

@pytest.mark.parametrize("paper", [p for p in [*CHAPTERS, *PAPERS] if (ROOT / p.notebook).exists()], ids=lambda p: p.key)
def test_one_name_for_notebook_and_module(paper):
    homes = [m for c in load(ROOT / paper.notebook)["cells"] for m in re.findall(r"^#\|\s*default_exp\s+(\S+)", source(c), re.M)]
    assert homes in ([f"methods.{paper.slug}"], []) and (homes or paper.arxiv is None)

def test_every_notebook_has_its_place():
    known = {p.key for p in [*CHAPTERS, *PAPERS]} | {"index"}
    assert [p.name for p in NOTEBOOKS if p.parent == ROOT / "nbs" and p.stem not in known] == []
    for p in NOTEBOOKS:
        if p.parent == ROOT / "nbs": continue
        homes = [m for c in load(p)["cells"] for m in re.findall(r"^#\|\s*default_exp\s+(\S+)", source(c), re.M)]
        folder = p.parent.name
        assert homes == [p.stem if folder == "core" else f"{folder}.{p.stem}"], p

# ---- notebooks are clean

def nbdev_cleaned(nb):
    from nbdev.clean import clean_nb
    nb = copy.deepcopy(nb)
    clean_nb(nb, allowed_cell_metadata_keys=["tags"], clean_ids=False)
    return nb

@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_notebook_is_clean(path):
    nb = load(path)
    assert nbdev_cleaned(nb) == nb, "run nbdev_clean, or rlw refresh"
    assert nb["metadata"] == KEPT and (nb["nbformat"], nb["nbformat_minor"]) == (4, 5)
    assert path.read_text(encoding="utf-8") == json.dumps(nb, sort_keys=True, indent=1, ensure_ascii=False) + "\n", "not written as nbdev writes"
    ids = [c["id"] for c in nb["cells"]]
    assert len(set(ids)) == len(ids), "a copied cell has kept the id of the other"
    assert not any(t in ("injected-parameters", "papermill-error-cell-tag") for c in nb["cells"] for t in c["metadata"].get("tags", []))
    title = source(nb["cells"][0])
    assert nb["cells"][0]["cell_type"] == "markdown" and re.match(r"# \S", title) and re.search(r"^> \S", title, re.M), "a title and a one-sentence subtitle"

def noise(outputs):
    "What must not be stored: streams of errors, bars, widgets, timings, places, addresses."
    for out in outputs:
        if out["output_type"] == "error": yield f"an error: {out['ename']}"
        if out.get("name") == "stderr": yield "standard error"
        data = out.get("data", {"text/plain": out.get("text", "")})
        if WIDGET in data: yield "a widget view"
        if "<progress" in "".join(data.get("text/html", "")): yield "a progress bar"
        for kind in ("text/plain", "text/html", "text/markdown"):
            text = "".join(data.get(kind, ""))
            if kind == "text/html": text = re.sub(r"<(style|script).*?</\1>|<[^>]+>", " ", text, flags=re.S)
            for what, rule in (("a timing", TIMING), ("a progress bar", BAR), ("a place", PLACE), ("an address", re.compile(r"0x[0-9a-f]{6}"))):
                if m := rule.search(text): yield f"{what}: {text[max(0, m.start() - 30):m.end() + 10]!r}"

@pytest.mark.parametrize("path", NOTEBOOKS, ids=IDS)
def test_stored_outputs_are_worth_keeping(path):
    cells = [c for c in load(path)["cells"] if c["cell_type"] == "code"]
    assert [(i, n) for i, c in enumerate(cells) for n in noise(c["outputs"])] == []
    figures = [len(base64.b64decode("".join(o["data"]["image/png"]))) for c in cells for o in c["outputs"] if "image/png" in o.get("data", {})]
    assert path.stat().st_size < 400_000 and all(size < 60_000 for size in figures), figures

def test_noise_is_found():
    stream = lambda text, name="stdout": {"output_type": "stream", "name": name, "text": [text]}
    bad = [stream("x", "stderr"), stream("took 3.2 s\n"), stream(" 45%|####  |"), stream("in /ho" + "me/a/b"), {"output_type": "display_data", "data": {WIDGET: {}}},
           stream("<A at 0x7f0123456789>"), {"output_type": "error", "ename": "E"}]
    assert [len(list(noise([b]))) for b in bad] == [1] * len(bad)
    assert list(noise([stream("PPO 0.83 at 267 k tokens, 3 seeds × 256 problems\n")])) == []

# ---- floors, pins, words

def test_floors_hold():
    r = subprocess.run([str(BIN / "lint-imports"), "--config", str(ROOT / ".importlinter"), "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert r.returncode == 0, r.stdout[-3000:] + r.stderr[-1000:]

def settings():
    parser = ConfigParser(delimiters=["="], interpolation=None)
    parser.read(ROOT / "settings.ini", encoding="utf-8")
    return parser["DEFAULT"]

def test_n9_notebook_tools_are_pinned_as_a_set():
    from packaging.requirements import Requirement
    wanted = {r.name: r.specifier for r in map(Requirement, f"{settings()['requirements']} {settings()['dev_requirements']}".split())}
    assert str(wanted["nbdev"]) == "==2.4.14" and str(wanted["execnb"]) == "==0.1.18"
    assert not wanted["fastcore"].contains("2.0.0") and not wanted["ghapi"].contains("2.0.0")
    assert settings()["allowed_cell_metadata_keys"] == "tags"        # without it the cleaner takes papermill's tag away

def test_n9_what_is_installed_is_what_is_asked_for():
    from packaging.requirements import Requirement
    for r in map(Requirement, f"{settings()['requirements']} {settings()['dev_requirements']}".split()):
        assert r.specifier.contains(version(r.name), prereleases=True), f"{r} is asked for, {version(r.name)} is installed"

def test_no_place_or_registry_in_tracked_files():
    slash = "/"
    words = [slash + "work" + slash, slash + "root" + slash, slash.join(["", "home", ""]), "pypi." + "org", "python" + "hosted", "npm" + "js"]
    config = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout + " ".join(v for k, v in os.environ.items() if k.startswith(("PIP_", "UV_")))
    words += {h for h in re.findall(r"https?://(?:[^@/\s']*@)?([\w.-]+)", config) if h not in ("localhost", "127.0.0.1")}
    found = [(path.relative_to(ROOT).as_posix(), word) for path, text in tracked() for word in words if word in text]
    assert found == []

def test_no_conflict_markers():
    mark = re.compile("^" + "(" + "<" * 7 + " |" + ">" * 7 + " )", re.M)
    assert [p.relative_to(ROOT).as_posix() for p, text in tracked() if mark.search(text)] == []

def test_readme_is_the_index():
    index = ROOT / "nbs/index.ipynb"
    assert index.exists(), "nbs/index.ipynb makes README.md"
    assert (ROOT / "README.md").read_text(encoding="utf-8") == readme(index), "run `rlw readme`"
