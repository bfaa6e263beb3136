from penstock.testing.trainer.checker import Gradients as Gradients
from penstock.testing.trainer.checker import RankFunction as RankFunction
from penstock.testing.trainer.checker import Report as Report
from penstock.testing.trainer.checker import StepFunction as StepFunction
from penstock.testing.trainer.checker import check as check
from penstock.testing.trainer.checker import each_rank as each_rank
from penstock.testing.trainer.judge import Finding as Finding
