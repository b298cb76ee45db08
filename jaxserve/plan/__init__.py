"""The capacity planner: what a card can hold, what it can compute, and what it can promise.

Knows no arrays and runs nothing: it is arithmetic on a model's dimensions and a card's rates.

    shape = model_shape("llama-3.1-8b", PLAN_MODELS["llama-3.1-8b"])
    plan = make_plan(Roofline(shape, CARDS["a100-80gb"]), Workload(), Promise())
    print(plan.limits.admission, plan.to_json())
"""

from jaxserve.plan.models import PLAN_MODELS as PLAN_MODELS
from jaxserve.plan.models import find_model as find_model
from jaxserve.plan.planner import cache_bytes as cache_bytes
from jaxserve.plan.planner import make_plan as make_plan
from jaxserve.plan.result import BatchPoint as BatchPoint
from jaxserve.plan.result import Limits as Limits
from jaxserve.plan.result import Plan as Plan
from jaxserve.plan.result import PrefillPoint as PrefillPoint
from jaxserve.plan.sums import max_sequences as max_sequences
from jaxserve.plan.sums import over_reservation as over_reservation
from jaxserve.plan.sums import shared_prompt_saving as shared_prompt_saving
from jaxserve.plan.sums import static_batch_utilisation as static_batch_utilisation
