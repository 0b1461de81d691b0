"Figures and panels: the style, gaps, strips, and the acceptance cases of widgets."
import asyncio, base64, gc, io, math, os, re, subprocess, sys, threading, time, warnings
from pathlib import Path
import numpy as np, pytest
from PIL import Image
from rlworkbench import figures
from rlworkbench.figures import *
from rlworkbench.stats import Interval

@pytest.fixture(autouse=True)
def headless(monkeypatch):
    monkeypatch.setenv("RLWORKBENCH_WIDGETS", "0")

def pixels(fig): return np.asarray(Image.open(io.BytesIO(png(fig))).convert("RGB")).astype(int)
def near(image, colour, tolerance=12):
    target = np.array([int(colour[i:i+2], 16) for i in (1, 3, 5)])
    return int((np.abs(image-target).max(-1) <= tolerance).sum())

def test_import_is_light():
    code = "import sys, rlworkbench.figures; print(*[m for m in ('matplotlib', 'ipywidgets', 'IPython', 'scipy', 'torch', 'pandas', 'PIL') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""

# --- style

def test_figures_have_one_size_no_window_and_repeatable_bytes():
    import matplotlib.pyplot as plt
    plt.close("all")
    one, two = (curves({"PPO": dict(x=[0, 1], mean=[.1, .2])}) for _ in range(2))
    assert png(one) == png(two) and plt.get_fignums() == []
    bundle = one._repr_mimebundle_()
    image = Image.open(io.BytesIO(base64.b64decode(bundle["image/png"])))
    assert image.width == 900 and "Software" not in image.info
    assert bundle["text/plain"] == "curves of accuracy for PPO" and "0x" not in bundle["text/plain"]

def test_every_figure_stays_under_60_kB_and_900_pixels():
    text = "[12+5:17;[17-3:14;>21;"*12
    rng = np.random.default_rng(0)
    arms = {a: dict(x=np.arange(40), mean=rng.random(40), low=rng.random(40)-1, high=rng.random(40)+1) for a in "abcdef"}
    for fig in (curves(arms), token_strip(text, rng.normal(size=(3, len(text)))), stage_map(), training_strip({k: rng.random(50) for k in "abcdefgh"})):
        stored = base64.b64decode(fig._repr_mimebundle_()["image/png"])
        assert len(stored) < 60_000 and Image.open(io.BytesIO(stored)).width == 900

def test_style_leaves_other_figures_alone():
    import matplotlib
    before = dict(matplotlib.rcParams)
    curves({"PPO": dict(x=[0, 1], mean=[.1, .2])})
    assert dict(matplotlib.rcParams) == before

def test_baseline_is_grey_method_blue_controls_dashed_and_all_differ_without_colour():
    looks = arm_styles(["PPO", "ESPO", "regret only", "random stop"], controls=["random stop"])
    assert looks["PPO"]["color"] == GREY and looks["ESPO"]["color"] == BLUE
    assert [a for a, l in looks.items() if l["linestyle"] != "-"] == ["random stop"]
    assert len({(l["marker"], str(l["linestyle"])) for l in looks.values()}) == 4
    assert arm_styles(["ESPO", "PPO"], baseline="PPO")["ESPO"]["color"] == BLUE
    assert len(arm_styles([f"arm {i}" for i in range(12)])) == 12
    without = arm_styles(["ESPO", "regret only", "random stop"], baseline=False, controls="random stop")   # the same looks where the baseline is not shown
    assert all(without[a] == looks[a] for a in without)
    with pytest.raises(ValueError, match="the arms are"): arm_styles(["PPO"], method="ESPO")

# --- curves

def test_a4_gaps_stay_gaps_in_the_plot():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fig = curves({"PPO": dict(x=range(6), mean=[.5, None, math.nan, .8, .6, .7]), "ESPO": dict(x=range(6), mean=[math.nan]*6)}, band="none")
        png(fig)
    line = fig.axes[0].lines[0]
    assert np.isnan(line.get_ydata()).tolist() == [False, True, True, False, False, False]   # neither 0 nor joined
    assert 0 in line.get_markevery()                       # the lone point is visible
    assert any("not measured: ESPO" in t.get_text() for t in fig.axes[0].texts)
    assert fig._supxlabel.get_text() == "Gaps: not measured."

def test_caption_says_which_interval_the_bands_are():
    arm = dict(x=[0, 1], mean=[.1, .2], low=[.0, .1], high=[.2, .3])
    assert curves({"PPO": arm}, band="95 % t interval over 3 seeds")._supxlabel.get_text() == "Bands: 95 % t interval over 3 seeds."

def test_curves_take_results_files_objects_and_several_measures():
    stored = {"PPO": {"accuracy": dict(x=[0, 1], mean=[.1, .2]), "length": dict(x=[0, 1], mean=[40, 50])}}
    fig = curves(stored, ["accuracy", "length"], ylabels=["accuracy", "tokens"], title=["a", "b"])
    assert [ax.get_ylabel() for ax in fig.axes] == ["accuracy", "tokens"]
    class Results:
        arms = ["PPO"]
        def curve(self, arm, measure, against="batch"): return stored[arm][measure] | dict(x=[0, 900] if against == "tokens" else [0, 1])
    by_tokens, by_batch = curves(Results()), curves(Results(), against="batch")
    assert [f.axes[0].get_xlabel() for f in (by_tokens, by_batch)] == ["generated tokens", "batch of rollouts"]
    assert [f.axes[0].lines[0].get_xdata()[-1] for f in (by_tokens, by_batch)] == [900, 1]
    assert pixels(curves(Results(), "length")).shape == pixels(curves(stored, "length")).shape
    with pytest.raises(ValueError, match="has no measure 'reward'"): curves(stored, "reward")
    with pytest.raises(ValueError, match="2 x, 1 mean"): curves({"PPO": dict(x=[0, 1], mean=[.1])})

def test_no_label_is_clipped():
    arms = {name: dict(x=[0, 250_000], mean=[.1, .8+i/500]) for i, name in enumerate(["PPO", "ESPO", "random stop at equal rate", "regret only"])}
    rows = {f"{a} − PPO": Interval(.02, .0, .04, 3, 256, -.1, .1) for a in arms}
    for fig in (curves(arms), forest(rows, ">= -0.01"), stage_map(), training_strip(dict(reward=[1e-7, 2e-7], kl=[1., 2.]), title="a run")):
        edge = pixels(fig)
        assert all((side > 250).all() for side in (edge[0], edge[-1], edge[:, 0], edge[:, -1]))   # ink at an edge is ink cut off
        fig.canvas.draw()
        ticks = {id(label) for ax in fig.axes for axis in (ax.xaxis, ax.yaxis) for tick in axis.get_major_ticks() for label in (tick.label1, tick.label2)}   # some wait out of view
        for text in fig.findobj(lambda a: id(a) not in ticks and a.__class__.__name__ in ("Text", "Annotation") and a.get_visible() and a.get_text()):
            box = text.get_window_extent()
            if box.width: assert box.x0 >= 0 and box.x1 <= 901 and box.y0 >= -1 and box.y1 <= fig.bbox.height+1, text.get_text()

def test_end_labels_do_not_cover_each_other():
    fig = curves({name: dict(x=[0, 1], mean=[0, .5]) for name in ("PPO", "ESPO", "regret", "value")})
    fig.canvas.draw()
    boxes = sorted((t.get_window_extent() for t in fig.axes[0].texts), key=lambda b: b.y0)
    assert len(boxes) == 4 and all(low.y1 <= high.y0+1 for low, high in zip(boxes, boxes[1:]))

# --- forest

def test_forest_takes_intervals_and_results_files():
    i = Interval(.021, .004, .038, 3, 256, -.012, .054)
    stored = [dict(measure="accuracy", arm="ESPO", against="PPO", **i.as_dict())]
    assert "+0.021 [+0.004, +0.038]" in forest({"ESPO − PPO": i}, ">= -0.01").alt and "+0.021 [+0.004, +0.038]" in forest(stored).alt
    assert near(pixels(forest({"a": i}, ">= -0.01")), VERMILION) > near(pixels(forest({"a": i})), VERMILION) == 0
    assert "t interval over seeds" in forest({"a": i})._supxlabel.get_text()
    assert "t interval" not in forest({"a": Interval(.1, 0, .2, 8, 20)})._supxlabel.get_text()
    png(forest({"a": Interval(math.nan, math.nan, math.nan)}))

# --- strips

def test_strip_colours_blue_up_red_down_white_zero_grey_untrained():
    fig = token_strip("abcd", [2., -2., 0., 2.], mask=[1, 1, 1, 0])
    def boxes(fig): return [p.get_facecolor()[:3] for p in fig.axes[0].patches if p.get_height() == 16]
    faces = boxes(fig)
    def rgb(c): return tuple(int(c[i:i+2], 16)/255 for i in (1, 3, 5))
    assert faces[0] == pytest.approx(rgb(UP)) and faces[1] == pytest.approx(rgb(DOWN)) and faces[2] == (1, 1, 1) and faces[3] == pytest.approx(rgb(UNTRAINED))
    other = boxes(token_strip("abcd", [1., -2., 0., 2.], mask=[1, 1, 1, 0]))
    assert other[1] == pytest.approx(rgb(DOWN)) and other[0][0] > rgb(UP)[0]   # one symmetric scale

def test_strip_untrained_values_do_not_set_the_scale():
    faces = [p.get_facecolor() for p in token_strip("ab", [1., 99.], mask=[1, 0]).axes[0].patches[:1]]
    assert faces == [p.get_facecolor() for p in token_strip("ab", [1., 0.]).axes[0].patches[:1]]

def test_strip_carries_the_sign_without_colour():
    texts = [t.get_text() for t in token_strip(["forty", "three"], [.5, -.25]).axes[0].texts]
    assert "+0.50" in texts and "−0.25" in texts
    bars = token_strip("ab"*3, [.1, -.2, .3, .4, -.5, .6])       # too narrow for numbers: bars, up and down
    base = bars.axes[0].lines[-1].get_ydata()[0]
    heights = [(p.get_y() < base, p.get_height()) for p in bars.axes[0].patches[:12] if p.get_height() < 15]
    assert [up for up, _ in heights] == [True, False, True, True, False, True]
    assert [h for _, h in heights] == pytest.approx([5*v/.6 for v in (.1, .2, .3, .4, .5, .6)])

def test_strip_survives_any_text():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        png(token_strip(["$\\frac{", "\n", "", " ", "_^", "{}", "x"*300], np.linspace(-1, 1, 7), title="$ alone", labels="a_b$"))
        png(token_strip(["a"], [math.nan])); png(token_strip(["a"], [0.], mask=[0]))

def test_strip_rows_wrap_together_and_cuts_are_drawn():
    one, three = (token_strip("a"*200, np.ones((n, 200)), labels=[f"row {i}" for i in range(n)]) for n in (1, 3))
    assert three.get_figheight() > 2*one.get_figheight()
    plain, cut = token_strip("a"*30, np.ones(30)), token_strip("a"*30, np.ones(30), cuts=12)
    assert len(cut.axes[0].lines) == len(plain.axes[0].lines)+1

@pytest.mark.parametrize("arguments, message", [(("abc", [1, 2]), "for 3 tokens"), (("", []), "values must be"), (("ab", [[1, 2]], None, ["a", "b"]), "one label per row")])
def test_strip_refuses_what_does_not_fit(arguments, message):
    with pytest.raises(ValueError, match=message): token_strip(*arguments)

# --- map and course

def test_stage_map_fills_what_is_ready(tmp_path):
    (tmp_path/"nbs").mkdir(); (tmp_path/"results").mkdir()
    planned = stage_map(root=tmp_path)
    for key in ("06_verigate", "07_espo"): (tmp_path/f"nbs/{key}.ipynb").write_text("{}")
    ready = stage_map(root=tmp_path)
    assert planned.alt.endswith("0 of them ready") and ready.alt.endswith("2 of them ready")
    assert near(pixels(ready), BLUE) > near(pixels(planned), BLUE)

def test_training_strip_takes_log_rows_with_gaps():
    log = [dict(step=1, reward=.1, note="x"), dict(step=2, reward=None), dict(step=3, reward=.3, kl=.01), dict(train_runtime=3.)]
    fig = training_strip(log, ["reward", "kl"])
    assert np.isnan(fig.axes[0].lines[0].get_ydata()).tolist() == [False, True, False, True]
    png(fig); png(training_strip(dict(a=[math.nan, math.nan])))
    with pytest.raises(ValueError, match="were not logged"): training_strip(log, ["loss"])

# --- panels

def simple(n_bins): return np.arange(10) % n_bins
def bars(result):
    with style(): fig, ax = new_figure(height=1.5, alt="bars")
    ax.bar(range(len(result)), result); ax.set_axis_off()      # ticks would take half of the time
    return fig

def test_w1_one_figure_per_slider():
    import matplotlib.pyplot as plt
    plt.close("all")
    explorer = Explorer(simple, bars, n_bins=(1, 250, 3))
    slider = explorer.panel.children[0].children[0]
    def live_figures():
        gc.collect()
        return sum(type(o).__name__ in ("Picture", "Figure") for o in gc.get_objects())
    counts = []
    for moves in (10, 200):
        for i in range(moves): slider.value = 1 + (slider.value+i) % 240
        assert explorer.error is None
        images = [c for c in explorer.panel.children if type(c).__name__ == "Image"]
        assert len(images) == 1 and bytes(images[0].value) == png(bars(simple(slider.value)))
        assert len(plt.get_fignums()) <= 1
        counts.append(live_figures())
    assert counts[1] <= counts[0]+1     # memory flat

def test_w1_figures_of_pyplot_are_closed_too():
    import matplotlib.pyplot as plt
    plt.close("all")
    def draw(result):
        fig, ax = plt.subplots(); ax.plot(result)
        return ax
    explorer = Explorer(simple, draw, n_bins=(1, 50, 3))
    for n in range(4, 14): explorer.set(n_bins=n)
    assert plt.get_fignums() == [] and explorer.n_computed == 11

def test_w2_errors_show_inside_the_panel_and_can_be_raised():
    def compute(level, press):
        if level > 5 or press > 1: raise ValueError(f"level {level} <b>is too high</b>")
        return level
    explorer = Explorer(compute, lambda v: bars([v, 1]), level=(0, 10, 3), press=Clicks("again"))
    slider, button = explorer.panel.children[0].children
    message, image = explorer.panel.children[1:3]
    good = image.value
    slider.value = 7                                # a slider handler that raises
    assert "ValueError" in message.value and "level 7 &lt;b&gt;is too high" in message.value and image.value == good
    with pytest.raises(ValueError, match="level 7"): explorer.check()
    slider.value = 4                                # the panel still works
    assert message.value == "" and image.value != good and explorer.check() is explorer
    button.click(); assert explorer.settings["press"] == 1 and explorer.error is None
    button.click()                                  # a button handler that raises
    assert "ValueError" in message.value and "press=2" in message.value
    with pytest.raises(ValueError): explorer.check()

def test_w2_wrong_types_show_inside_the_panel():
    explorer = Explorer(lambda n, kind, on: np.ones(n), bars, n=(1, 50, 3), kind=["a", "b"], on=True)
    message = explorer.panel.children[1]
    for wrong, text in ((dict(n="three"), "n must be a number from 1 to 50, got &#x27;three&#x27;"), (dict(n=99), "got 99"), (dict(kind="c"), "kind must be one of"), (dict(on=3), "on must be True or False")):
        explorer.set(**wrong)
        assert text in message.value
        with pytest.raises(ValueError): explorer.check()
    assert explorer.set(n=5, kind="b", on=False).check().settings == dict(n=5, kind="b", on=False) and message.value == ""
    assert [w.value for w in explorer.panel.children[0].children] == [5, "b", False]
    bad = Explorer(lambda n: n, lambda n: bars([n]) if n < 5 else 3.5, n=(1, 9, 2)).set(n=7)
    with pytest.raises(TypeError, match="must return a figure, a table or text, got float"): bad.check()

def test_w3_without_front_end_a_panel_is_one_picture():
    explorer = Explorer(simple, bars, n_bins=(1, 50, 3))
    bundle = explorer._repr_mimebundle_()
    assert sorted(bundle) == ["image/png", "text/plain"] and bundle["text/plain"] == "bars (n_bins = 3)"
    image = Image.open(io.BytesIO(base64.b64decode(bundle["image/png"])))
    assert image.size == (900, 150+24)
    table = Explorer(lambda n: n, lambda n: f"{n} < 5", n=(1, 9, 2))._repr_mimebundle_()
    assert sorted(table) == ["text/html", "text/plain"] and "2 &lt; 5" in table["text/html"]

def test_w3_an_error_at_the_first_settings_fails_the_cell():
    with pytest.raises(ZeroDivisionError): Explorer(lambda n: 1/n, bars, n=(0, 5, 0))
    with pytest.raises(TypeError, match="draw returned nothing"): Explorer(simple, lambda r: None, n_bins=(1, 50, 3))

def test_w3_front_end_gets_view_and_picture_and_no_widget_name(monkeypatch):
    monkeypatch.setenv("RLWORKBENCH_WIDGETS", "1")
    bundle = Explorer(simple, bars, n_bins=(1, 50, 3))._repr_mimebundle_()
    assert sorted(bundle) == ["application/vnd.jupyter.widget-view+json", "image/png", "text/plain"]
    assert not re.search("VBox|Output|HBox", bundle["text/plain"])

NOTEBOOK = '''import numpy as np
from rlworkbench.figures import Explorer, new_figure, token_strip
def draw(result):
    import matplotlib.pyplot as plt
    fig, ax = plt.subplots(figsize=(9, 2)); ax.plot(result)
    return fig
explorer = Explorer(lambda n: np.arange(10) % n, draw, n=(1, 9, 3))
explorer'''

def test_w3_as_a_job_and_as_html(tmp_path, monkeypatch):
    import nbformat, papermill
    from nbconvert import HTMLExporter
    monkeypatch.delenv("RLWORKBENCH_WIDGETS"); monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(NOTEBOOK), nbformat.v4.new_code_cell("explorer.set(n=4); token_strip('ab', [1, -1])"), nbformat.v4.new_code_cell("import sys; print('ipywidgets' in sys.modules)")],
                                 metadata={"kernelspec": {"name": "python3", "display_name": "python3", "language": "python"}})
    nbformat.write(nb, tmp_path/"in.ipynb")
    out = papermill.execute_notebook(str(tmp_path/"in.ipynb"), str(tmp_path/"out.ipynb"), progress_bar=False)
    outputs = [[o for o in c.outputs if "data" in o] for c in out.cells]
    assert [len(o) for o in outputs] == [1, 1, 0]                          # one picture a cell, none twice
    for cell in outputs[:2]: assert sorted(cell[0].data) == ["image/png", "text/plain"]
    assert out.cells[2].outputs[0].text == "False\n"                       # no widget library was needed
    page, _ = HTMLExporter().from_notebook_node(out)
    assert page.count("<img") == 2 and not re.search(r"Output\(|VBox\(|Traceback", page)

def test_w4_flood_of_moves_is_thinned_out():
    seen = []
    def slow(n): seen.append(n); time.sleep(.2); return np.ones(3)*n
    explorer = Explorer(slow, lambda r: "done", n=(0, 100, 0))
    slider = explorer.panel.children[0].children[0]
    seen.clear()
    async def flood():
        start = time.monotonic()
        for n in range(1, 101):                     # the front end sends on while we compute: late moves arrive at once
            await asyncio.sleep(max(0, start+n/100-time.monotonic()))
            slider.value = n
        released = time.monotonic()
        while explorer.shown["n"] != 100: await asyncio.sleep(.01)
        took_s, n = time.monotonic()-released, len(seen)
        await asyncio.sleep(.5)
        return took_s, n
    took_s, n = asyncio.run(flood())
    assert n <= 10 and took_s < 1 and seen[-1] == 100
    assert len(seen) == n                            # nothing was queued

def test_w4_flood_through_a_kernel(tmp_path, monkeypatch):
    "The same with a real kernel and the messages a front end would send."
    from jupyter_client.manager import start_new_kernel
    monkeypatch.setenv("RLWORKBENCH_WIDGETS", "1")
    manager, client = start_new_kernel(kernel_name="python3")
    def run(code):
        out = []
        client.execute_interactive(code, output_hook=lambda m: out.append(m["content"]), timeout=60)
        errors = [o for o in out if "traceback" in o]
        assert not errors, errors
        return "".join(o.get("text", "") for o in out).strip()
    try:
        model = run("import time; from rlworkbench.figures import Explorer\nseen = []\n"
                    "def slow(n): seen.append(n); time.sleep(.2); return n\n"
                    "e = Explorer(slow, lambda r: f'{r}', n=(0, 100, 0)); print(e.panel.children[0].children[0].model_id)")
        for n in range(1, 101):
            client.shell_channel.send(client.session.msg("comm_msg", dict(comm_id=model, data=dict(method="update", state=dict(value=n), buffer_paths=[]))))
            time.sleep(.01)
        time.sleep(1.)
        n_seen, last, shown = run("print(len(seen)-1, seen[-1], e.panel.children[3].value)").split(maxsplit=2)
        assert int(n_seen) <= 10 and last == "100" and "100" in shown
        time.sleep(.4)
        assert run("print(len(seen)-1)") == n_seen
    finally:
        client.stop_channels(); manager.shutdown_kernel(now=True)

def test_w5_control_survives_clearing():
    explorer = Explorer(lambda kind: np.ones(len(kind)), bars, kind=["a", "bb", "ccc"])
    panel, dropdown = explorer.panel, explorer.panel.children[0].children[0]
    children, pictures = panel.children, []
    for kind in ("bb", "ccc", "a", "bb", "ccc"):
        dropdown.value = kind; pictures.append(panel.children[2].value)
    assert explorer.panel is panel and panel.children == children and panel.children[0].children[0] is dropdown
    assert dropdown.options == ("a", "bb", "ccc") and dropdown.disabled is False and pictures[0] != pictures[1] and pictures[0] == pictures[3]
    assert explorer.panel.children[1].value == "" and "(" not in explorer.panel.children[3].value

def test_panel_answers_within_a_fifth_of_a_second():
    def lines(result):
        fig, ax = new_figure(height=2.6); ax.plot(result); ax.set(xlabel="step", ylabel="share", title="two axes with ticks")
        return fig
    explorer = Explorer(lambda n: np.sin(np.arange(500)/n), lines, n=(1, 250, 3)); explorer.panel
    took = []
    for n in range(4, 14):    # processor time: other work on the machine is not ours
        start = time.process_time(); explorer.set(n=n); took.append(time.process_time()-start)
    assert sorted(took)[len(took)//2] < .2

def test_moves_from_another_thread_do_not_collide():
    explorer = Explorer(simple, bars, n_bins=(1, 250, 3)); explorer.panel
    threads = [threading.Thread(target=lambda k=k: [explorer.set(n_bins=k+i) for i in range(5)]) for k in (10, 30)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert explorer.error is None and explorer.picture[0] == png(bars(simple(explorer.shown["n_bins"])))

def test_still_leaves_the_panel_as_it_is():
    explorer = Explorer(simple, bars, n_bins=(1, 50, 3))
    assert explorer.still(n_bins=9)[:4] == b"\x89PNG" and explorer.settings == {"n_bins": 3}

@pytest.mark.parametrize("controls, message", [({}, "needs a control"), (dict(n=(0, 6)), "is no control"), (dict(n=(0, 6, 9)), "n must be a number from 0 to 6"), (dict(n=[]), "is no control")])
def test_bad_controls_are_refused(controls, message):
    with pytest.raises(ValueError, match=message): Explorer(lambda **k: 1, str, **controls)
