"""The inputs of a panel: declared as class attributes, used like plain Python attributes.

    class MyPanel(Panel):
        context_length = Number("Context length", 4096, low=128, high=1 << 20, powers_of_two=True)

    panel.context_length = 8192        # does exactly what moving the slider does

A control has bounds, checks values and makes widgets; the panel holds the value.
"""

from collections.abc import Callable
from typing import Any, SupportsFloat

from toolkit._checks import checked
from toolkit._compat import tooltip

LABEL_WIDTH = "136px"  # the longest label in whole


class Control:
    """One input of a panel, declared as a class attribute.

    Attributes:
        label: the label, with the unit.
        default: the initial value.
        explanation: a sentence shown on hovering.
        name: the attribute's name, set when the class is made.
    """

    name: str

    @checked
    def __init__(self, label: str, default: Any, explanation: str = "") -> None:
        self.label, self.default, self.explanation = label, default, explanation

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, panel: Any, owner: type) -> Any:
        return self if panel is None else panel.state[self.name]

    def __set__(self, panel: Any, value: Any) -> None:
        panel.change(**{self.name: value})

    def described(self) -> str:
        """The control in words, for the docstring of its panel."""
        return f"{self.label}{self.takes()}. {self.explanation}".rstrip(". ") + "."

    def takes(self) -> str:
        """The accepted values in words, if not obvious."""
        return ""

    def check(self, value: Any) -> Any:
        """The value in the control's own type, or a ValueError that names the control."""
        raise NotImplementedError

    def refuse(self, value: Any, wanted: str) -> ValueError:
        """The error for a wrong value."""
        return ValueError(f"{self.name}: got {value!r}, wanted {wanted}")

    def widgets(self, on_change: Callable[[Any], None]) -> "ControlWidgets":
        """The visible part; calls `on_change(value)` when the user moves it."""
        raise NotImplementedError

    def look(self, width: str) -> dict[str, Any]:
        """Settings shared by all widgets with a label."""
        return {
            "description": self.label,
            **tooltip(self.explanation or self.label),
            "style": {"description_width": LABEL_WIDTH},
            "layout": {"width": width, "max_width": "calc(100% - 4px)"},
        }


class ControlWidgets:
    """The widgets of a control: `box` to place, `show(value)` to follow a change from Python.

    Attributes:
        box: the widget to place in the panel.
        inputs: the widgets a user can move.
    """

    def __init__(
        self,
        box: Any,
        inputs: tuple[Any, ...],
        on_change: Callable[[Any], None],
        trait: str = "value",
    ) -> None:
        self.box, self.inputs, self.on_change, self._trait = box, inputs, on_change, trait
        self._is_following = False
        for widget in inputs:
            widget.observe(self._moved, names=trait)

    def _moved(self, event: dict[str, Any]) -> None:
        if not self._is_following:
            self.on_change(event["new"])

    def show(self, value: Any) -> None:
        """Set every input to `value` without reporting it as a user's move."""
        self._set(self._trait, value)

    def set_maximum(self, maximum: float) -> None:
        """Move the upper bound of every input, which may carry the value with it."""
        self._set("max", maximum)

    def _set(self, trait: str, value: Any) -> None:
        self._is_following = True
        try:
            for widget in self.inputs:
                setattr(widget, trait, value)
        finally:
            self._is_following = False


class Number(Control):
    """A number with a slider and, beside it, a box to type in.

    Attributes:
        low, high: bounds, both allowed.
        step: distance between neighbouring slider positions; an integer step means integers.
        powers_of_two: the slider moves in doublings; the box still takes every value between.
        is_continuous: redraw while dragging, not only on release.
        maximum: the slider's end for a view, such as the last word of a sentence.

    Example:
        >>> heads = Number("Heads", 4, low=1, high=64)
        >>> heads.name = "heads"  # a panel's class does that
        >>> heads.check(8.0)
        8
    """

    @checked
    def __init__(
        self,
        label: str,
        default: float,
        *,
        low: float,
        high: float,
        step: float = 1,
        powers_of_two: bool = False,
        is_continuous: bool = True,
        explanation: str = "",
        maximum: Callable[[Any], int] | None = None,
    ) -> None:
        super().__init__(label, default, explanation)
        self.low, self.high, self.step, self.maximum = low, high, step, maximum
        self.powers_of_two, self.is_continuous = powers_of_two, is_continuous
        self.is_integer = isinstance(step, int)

    def takes(self) -> str:
        return f", {self.low:,} to {self.high:,}"

    def check(self, value: Any) -> float:
        if isinstance(value, bool | str) or not isinstance(value, SupportsFloat):
            raise self.refuse(value, "a number")
        number = float(value)
        if not self.low <= number <= self.high:
            raise self.refuse(value, f"{self.low} to {self.high}")
        # Rounds a browser's sums of steps, such as 0.9099999999999999.
        return round(number) if self.is_integer else float(f"{number:.12g}")

    def widgets(self, on_change: Callable[[Any], None]) -> ControlWidgets:
        import ipywidgets as widgets

        look = {"readout": False, "continuous_update": self.is_continuous, **self.look("326px")}
        bounds: dict[str, Any] = {"min": self.low, "max": self.high, "step": self.step}
        if self.powers_of_two:
            low, high = (int(bound).bit_length() - 1 for bound in (self.low, self.high))
            slider = widgets.FloatLogSlider(self.default, base=2, min=low, max=high, step=1, **look)
        else:
            kind = widgets.IntSlider if self.is_integer else widgets.FloatSlider
            slider = kind(self.default, **bounds, **look)
        box_kind = widgets.BoundedIntText if self.is_integer else widgets.BoundedFloatText
        named, narrow = tooltip(f"{self.label}: type a value"), {"width": "92px"}
        box = box_kind(self.default, **bounds, **named, layout=narrow)
        slider.add_class(f"slider-{self.name}")
        box.add_class(f"box-{self.name}")
        return ControlWidgets(widgets.HBox([slider, box]), (slider, box), on_change)


class Choice(Control):
    """One of a few named options, as a dropdown.

    Attributes:
        options: shown text -> value.

    Example:
        >>> precision = Choice("Precision", 2, {"float32": 4, "bfloat16": 2})
        >>> precision.check(4)
        4
    """

    @checked
    def __init__(
        self, label: str, default: Any, options: dict[str, Any], *, explanation: str = ""
    ) -> None:
        super().__init__(label, default, explanation)
        self.options = options

    def takes(self) -> str:
        return f", one of {', '.join(map(repr, self.options.values()))}"

    def check(self, value: Any) -> Any:
        if value not in self.options.values():
            raise self.refuse(value, self.takes().removeprefix(", "))
        return value

    def widgets(self, on_change: Callable[[Any], None]) -> ControlWidgets:
        import ipywidgets as widgets

        menu = widgets.Dropdown(
            options=list(self.options.items()), value=self.default, **self.look("422px")
        )
        menu.add_class(f"choice-{self.name}")
        return ControlWidgets(menu, (menu,), on_change)


class Words(Control):
    """A line of text; the panel follows when the user presses Enter or leaves the box.

    Example:
        >>> Words("Sentence", "the cat").check("  the cat sat ")
        'the cat sat'
    """

    def check(self, value: Any) -> str:
        if not isinstance(value, str) or not value.strip():
            raise self.refuse(value, "some words")
        return value.strip()

    def widgets(self, on_change: Callable[[Any], None]) -> ControlWidgets:
        import ipywidgets as widgets

        text = widgets.Text(value=self.default, continuous_update=False, **self.look("848px"))
        text.add_class(f"words-{self.name}")
        return ControlWidgets(text, (text,), on_change)
