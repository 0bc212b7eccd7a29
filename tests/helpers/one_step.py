"""One training step of the threads engine, for tests that look at what it computes."""

from mheads.engine.engine_options import EngineOptions
from mheads.engine.threads import ThreadsEngine


def engine_gradients(net, loss, batch, *, workers=2, micro_batches=3, step=0, **options):
    """The report of a step, and copies of the gradients of each stage."""
    engine = ThreadsEngine(net, EngineOptions(workers, micro_batches, **options))
    collected = {}
    try:
        report = engine.step(step, batch, loss)
        engine.update(lambda stage, gradients: collected.update({stage: [g.clone() for g in gradients]}))
    finally:
        engine.close()
    return report, collected
