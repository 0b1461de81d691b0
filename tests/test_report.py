"Results files and the report made of them."
import copy, json, os, subprocess, sys
from html.parser import HTMLParser

import pytest

from rlworkbench.notebooks import source_hash
from rlworkbench.report import check_results, comparison_text, curve_svg, html_page, read_results, report_row, results_schema, text_table, verdict

MADE = dict(chapter="07_espo", paper="2605.29860", scale="claim", module_hash="0123456789ab", versions={"torch": "2.13.0"},
            machine={"cores": 2, "memory_gib": 24.0, "device": "cpu"}, minutes=12.5, seeds=[0, 1, 2], budget={"kind": "rollouts", "value": 5120},
            gate={"start accuracy": {"value": .1, "threshold": "0.05 to 0.50", "passed": True}},
            arms={"PPO": {"accuracy": [.82, .80, .84], "tokens": [267e3, 265e3, 266e3]}, "ESPO": {"accuracy": [.86, .85, .87], "tokens": [238e3, 236e3, None]}},
            curves={a: {"accuracy": {"x": [0, 20, 40], "mean": [.1, .6, .85], "low": [.1, None, .84], "high": [.1, .7, .86]}} for a in ("PPO", "ESPO")},
            comparisons=[dict(measure="accuracy", arm="ESPO", against="PPO", difference=.045, interval=[.02, .07], level=.95, n={"seeds": 3, "problems": 256}, t_interval=[.01, .08]),
                         dict(measure="tokens (ratio)", arm="ESPO", against="PPO", difference=.89, interval=[None, None], n={"seeds": 3, "problems": None})],
            claims=[dict(text="As accurate as PPO", source="[paper]", rule=">= -0.01", value=.045, interval=[.02, .07], verdict="holds", reason="")])

def changed(*path, to):
    data = copy.deepcopy(MADE)
    at = data
    for key in path[:-1]: at = at[key]
    at[path[-1]] = to
    return data

def test_schema_is_a_schema():
    from jsonschema import Draft202012Validator
    Draft202012Validator.check_schema(results_schema())
    check_results(MADE)

@pytest.mark.parametrize("key", ["chapter", "paper", "scale", "module_hash", "versions", "machine", "minutes", "seeds", "budget", "gate", "arms", "curves", "comparisons", "claims"])
def test_nothing_may_be_missing(key):
    with pytest.raises(ValueError, match=f"'{key}' is a required property"): check_results({k: v for k, v in MADE.items() if k != key})

@pytest.mark.parametrize("path, to, said", [
    (("scale",), "huge", "scale: 'huge'"), (("claims", 0, "verdict"), "works", "claims.0.verdict: 'works'"), (("chapter",), "espo", "chapter: 'espo'"),
    (("seeds",), [], "seeds: "), (("seeds",), [0, 0, 1], "seeds: .*non-unique"), (("budget", "kind"), "hours", "budget.kind: 'hours'"),
    (("comparisons", 0, "interval"), [0.1], "comparisons.0.interval"), (("arms", "PPO", "accuracy"), [.8], "arms.PPO.accuracy: 1 values for 3 seeds"),
    (("curves", "PPO", "accuracy", "low"), [.1], "curves.PPO.accuracy: x, mean, low and high differ"), (("comparisons", 0, "against"), "GRPO", "no arm 'GRPO'"),
    (("note",), "x", "'note' was unexpected")])
def test_what_is_wrong_is_named(path, to, said):
    with pytest.raises(ValueError, match=said): check_results(changed(*path, to=to), "07_espo.json")

def test_reading_names_the_file(tmp_path):
    (tmp_path / "07_espo.json").write_text(json.dumps(MADE))
    assert list(read_results(tmp_path)) == ["07_espo"]
    (tmp_path / "08_corver.json").write_text("{")
    with pytest.raises(ValueError, match="08_corver.json is not a results file"): read_results(tmp_path)

def test_verdict_follows_claims_and_gates():
    claim = MADE["claims"][0]
    assert verdict(MADE) == "holds"
    assert verdict(changed("claims", to=[claim, claim | {"verdict": "does not hold here"}])) == "1 holds, 1 does not hold here"
    assert verdict(changed("gate", "start accuracy", "passed", to=False)) == "gate not met"
    assert verdict(changed("claims", to=[])) == "no claim"

def test_gaps_are_shown_as_missing(tmp_path):
    # a04: a mean leaves gaps out, and what is missing is a dash, not a nought
    row = report_row(MADE, tmp_path)
    assert row.tokens == "237 k" and comparison_text(MADE["comparisons"][1]) == "tokens (ratio) 0.89 [–, –] ESPO against PPO"
    assert report_row(changed("arms", "ESPO", "tokens", to=[None] * 3), tmp_path).tokens == "–"
    assert "NaN" not in curve_svg(MADE["curves"], "accuracy", "PPO") and "None" not in curve_svg(MADE["curves"], "accuracy", "PPO")

class Outline(HTMLParser):
    "Checks that tags close in order, and collects what a page would load."
    def __init__(self): super().__init__(); self.open, self.loads = [], []
    def handle_starttag(self, tag, attrs):
        self.loads += [v for k, v in attrs if k in ("src", "href") and not v.startswith("#")]
        if tag not in ("meta", "path", "polygon", "polyline"): self.open.append(tag)
    def handle_endtag(self, tag):
        if tag not in ("path", "polygon", "polyline"): assert self.open.pop() == tag

def test_page_stands_alone_and_is_well_formed(tmp_path):
    page = html_page({"07_espo": MADE, "08_corver": changed("comparisons", to=[])}, tmp_path)
    outline = Outline(); outline.feed(page)
    assert outline.open == [] and outline.loads == [] and "<script" not in page

def test_texts_are_escaped(tmp_path):
    page = html_page({"07_espo": changed("claims", 0, "reason", to="<script>alert(1)</script>")}, tmp_path)
    assert "<script>" not in page and "&lt;script&gt;" in page

def test_report_command(checkout, make_notebook):
    make_notebook("07_espo", "#| default_exp methods.espo", "#| export\ndef regret(): return 1")
    module = checkout / "rlworkbench/methods/espo.py"; module.parent.mkdir(parents=True); module.write_text("def regret(): return 1\n")
    (checkout / "results").mkdir()
    (checkout / "results/07_espo.json").write_text(json.dumps(MADE | {"module_hash": source_hash(module)}))
    def rlw(*words): return subprocess.run([sys.executable, "-P", "-c", "from rlworkbench.jobs import main; main()", *words], cwd=checkout, capture_output=True, text=True)
    r = rlw("report")
    line = next(l for l in r.stdout.splitlines() if l.startswith("07_espo"))
    assert r.returncode == 0 and line.split()[-1] == "fresh" and "accuracy +0.045 [+0.020, +0.070] ESPO against PPO" in line and (checkout / "runs/report.html").exists()
    assert "holds" in rlw("list").stdout and ", claim, fresh" in rlw("list").stdout
    module.write_text("def regret(): return 2\n")
    assert rlw("report").stdout.splitlines()[1].split()[-1] == "stale" and ", claim, stale" in rlw("list").stdout

def test_hash_is_the_one_that_results_carry(root):
    # results store `experiment.module_hash`, a listing computes the hash without an import: they are one
    experiment = pytest.importorskip("rlworkbench.experiment")
    assert experiment.module_hash("rlworkbench.spans").startswith(source_hash(root / "rlworkbench/spans.py"))

def test_committed_results(root):
    read_results(root / "results")
