"""A conformance test for trainers: is the gradient right, and if not, which bug explains it?

    from penstock.testing.trainer import check, each_rank
    from penstock.train import Grpo

    def step_fn(step, world):                  # one rank's step, as `source.step()` returns it
        ...                                    # forward and backward of all micro-batches
        return loss, gradients                 # by parameter name, before clipping and before the optimizer
    report = check(each_rank(step_fn), vocabulary=len(tokenizer), model=model, loss=Grpo())
    assert report.ok, report

Its modules:

    checker      `check`, `each_rank`, `Report`             samples      the probes: samples and steps
    reference    the model in float64, a sample at a time   simulated    a trainer in numpy, right or with a bug
    bugs*, fits  the catalogue of bugs                      judge        which bug predicts what was measured
"""

from penstock.lazy import exports_of

__getattr__, __dir__, __all__ = exports_of(__name__, __file__)
