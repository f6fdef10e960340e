"""SST-2: is a sentence of a film review positive or negative."""

from holdfast.data.tasks import TASKS
from holdfast_lab.tasks.label_task import LabelTask

SST2 = TASKS.register("sst2")(
    LabelTask(
        name="sst2",
        summary="sentiment of a film review's sentence: positive or negative",
        instruction="Analyze the sentiment of the input, and respond only positive or negative",
        column="sentence",
        held_out="validation",
        spellings={"negative": ("negative",), "positive": ("positive",)},
    )
)
