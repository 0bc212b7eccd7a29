"""fit as people use it in a notebook: in a real kernel, cell by cell."""

import textwrap

import pytest

jupyter_client = pytest.importorskip("jupyter_client", reason="needs ipykernel (the dev extra)")

SETUP = """
import sys; sys.path.insert(0, {here!r})
import user_networks, numpy as np, mheads
rng = np.random.default_rng(0)
x, y = rng.normal(size=(200, 1, 8, 8)).astype(np.float32), np.arange(200) % 10
def new():
    return mheads.TreeNet(user_networks.Plain, members=2, split="first")
def fit(iterations, **more):
    return mheads.fit(net, "mcl", train=(x, y), test=(x, y), iterations=iterations, **more)
"""


@pytest.fixture(scope="module")
def notebook():
    """Runs a cell and gives what it showed: a list of (mime type, content), the last state of each display."""
    from helpers.commands import HERE

    manager, client = jupyter_client.manager.start_new_kernel(kernel_name="python3")

    def cell(code, while_busy=None):
        client.execute(textwrap.dedent(code))
        shown, places = [], {}
        while True:
            message = client.get_iopub_msg(timeout=120)
            content, kind = message["content"], message["msg_type"]
            if kind == "status" and content["execution_state"] == "idle":
                return shown
            if kind == "stream":
                shown.append(("text/plain", content["text"]))
            if kind == "error":
                shown.append(("error", f"{content['ename']}: {content['evalue']}"))
            if kind in ("display_data", "execute_result", "update_display_data"):
                place = content.get("transient", {}).get("display_id") or len(shown)
                if kind != "update_display_data":
                    places[place] = len(shown)
                    shown.append(None)
                shown[places[place]] = max(content["data"].items(), key=lambda found: found[0] != "text/plain")
                if while_busy is not None:
                    while_busy(manager, shown)

    assert cell(SETUP.format(here=str(HERE))) == []
    yield cell
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def test_fit_shows_its_evaluations_and_the_run_says_what_it_is(notebook):
    progress, run = notebook("net = new(); run = fit(20); run")
    assert progress[0] == "text/html"
    assert "<th>Oracle</th>" in progress[1]
    assert progress[1].count("<tr>") == 1 + 10
    assert "<progress" not in progress[1]  # it is over
    assert "2 members of user_networks:Plain" in run[1]
    assert "Oracle" in run[1]
    assert run[1].count("\n") == 2


def test_a_second_fit_of_the_same_net_says_that_it_goes_on(notebook):
    notebook("net = new(); run = fit(20)")
    shown = notebook("again = fit(10)")
    assert "starting from the weights that 20 iterations" in shown[0][1]


def test_figures_are_shown_as_pictures(notebook):
    notebook("net = new(); run = fit(20)")
    for figure in ("run.plot_ownership()", "run.plot_history()"):
        assert notebook(figure)[0][0] == "image/png"


def test_a_folder_says_that_it_resumes_and_that_it_is_finished(notebook, tmp_path):
    folder = str(tmp_path / "run")
    notebook(f"net = mheads.TreeNet(user_networks.Plain, members=2); fit(10, folder={folder!r})")
    assert "resuming at iteration 10 of 20" in notebook(f"longer = fit(20, folder={folder!r})")[0][1]
    assert "is finished" in notebook(f"longer = fit(20, folder={folder!r})")[0][1]


def test_interrupting_the_kernel_leaves_the_run_so_far(notebook):
    interrupted = False

    def interrupt(manager, shown):
        nonlocal interrupted
        if not interrupted and "<td>2</td>" in shown[0][1]:  # it has been evaluated once
            interrupted = True
            manager.interrupt_kernel()

    code = """
    net = mheads.TreeNet(user_networks.Plain, members=2)
    try:
        fit(100_000, log={"evaluate_every": 2})
    except KeyboardInterrupt as stop:
        so_far = stop.run
    (so_far.summary["iterations"] > 1, so_far.predict(x).shape)
    """
    assert notebook(code, interrupt)[-1][1] == "(True, torch.Size([2, 200, 10]))"
    assert interrupted
