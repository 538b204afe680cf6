"""A sign that a cell of a notebook works, and about how long, gone when the cell ends.

It imports nothing that takes long, for it is shown while that is imported.
"""

import sys
from typing import Any

LEAST_SECONDS = 0.5  # shorter work needs no sign
# The browser moves the bar by itself, since the kernel cannot while it computes.
_BAR = """<style>
@keyframes lesson-fills {{ from {{ width: 2% }} to {{ width: 96% }} }}
.lesson-bar {{ height: 6px; max-width: 320px; background: #d8dee4; border-radius: 3px }}
.lesson-bar div {{ height: 100%; width: 2%; background: #0072b2; border-radius: 3px;
  animation: lesson-fills {seconds:g}s linear forwards }}
@media (prefers-reduced-motion: reduce) {{ .lesson-bar div {{ animation: none; width: 50% }} }}
</style><div role='status'>Working: {about}.<div class='lesson-bar'><div></div></div></div>"""
_is_shown = False


def working(seconds: float) -> str:
    """A line and a bar that fills in the estimated time; empty for short work."""
    if seconds < LEAST_SECONDS:
        return ""
    about = f"about {seconds:.0f} s on two cores" if seconds >= 2 else "a second or two"
    return _BAR.format(seconds=seconds, about=about)


def show_working(seconds: float) -> None:
    """Show `working` until the cell ends that runs now, once; nothing where none runs."""
    global _is_shown
    # The shell of a kernel alone has a parent: the message that it answers.
    shell: Any = "IPython" in sys.modules and sys.modules["IPython"].get_ipython()
    parent = getattr(shell, "get_parent", dict)()
    is_cell = parent.get("header", {}).get("msg_type") == "execute_request"
    if _is_shown or not is_cell or not (sign := working(seconds)):
        return
    from IPython.display import HTML, display

    shown: Any = display(HTML(sign), display_id=True)
    _is_shown = True

    def end(*_: Any) -> None:
        global _is_shown
        shown.update(HTML(""))
        _is_shown = False
        shell.events.unregister("post_run_cell", end)

    shell.events.register("post_run_cell", end)
