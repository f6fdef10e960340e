"""AG News: which of four sections a news article belongs to.

Sci/Tech is also named by sci, tech, science and technology (whole words), alone or together; Sports by sport.
"""

from holdfast.data.tasks import TASKS
from holdfast_lab.tasks.label_task import LabelTask

AG_NEWS = TASKS.register("ag_news")(
    LabelTask(
        name="ag_news",
        summary="section of a news article: World, Sports, Business or Sci/Tech",
        instruction=(
            "Categorize the news article given in the input into one of the 4 categories:\n\n"
            "World\nSports\nBusiness\nSci/Tech\n"
        ),
        column="text",
        held_out="test",
        spellings={
            "World": ("world",),
            "Sports": ("sports", "sport"),
            "Business": ("business",),
            "Sci/Tech": ("sci", "tech", "science", "technology"),
        },
    )
)
