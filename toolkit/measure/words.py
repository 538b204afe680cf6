"""Quantities in words, with suitable digits and units."""

from numbers import Integral

from toolkit._checks import checked

_UNITS: dict[str, tuple[float, tuple[str, ...]]] = {
    "bytes": (1024.0, ("B", "KiB", "MiB", "GiB", "TiB", "PiB")),
    "FLOP": (1000.0, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP")),
}
_TIMES = ((1e-9, "ns"), (1e-6, "µs"), (1e-3, "ms"), (1.0, "s"), (3600.0, "h"), (86400.0, "days"))
SPOKEN_UNITS = ("seconds", *_UNITS, "share", "times")
"""Units whose words depend on the number."""


@checked
def in_words(value: float, unit: str = "") -> str:
    """A number with its unit: three digits and a fitting prefix.

    Args:
        value: the number, in the base unit.
        unit: `"seconds"`, `"bytes"` (binary prefixes), `"FLOP"`, `"share"` (of 1, in per cent),
            `"times"` (a ratio, in two digits), any other word, or none.

    Returns:
        For example `"3.50 ms"`, `"64.0 MiB"`, `"12,000 tokens"`, `"12.5%"`, `"1.6×"`.

    Example:
        >>> in_words(0.0035, "seconds"), in_words(64 * 2**20, "bytes"), in_words(12_000, "tokens")
        ('3.50 ms', '64.0 MiB', '12,000 tokens')
        >>> in_words(0.125, "share"), in_words(128.4, "times"), in_words(0.123456)
        ('12.5%', '128×', '0.1235')
        >>> in_words(1e-9, "share")
        'under 0.001%'
    """
    if unit == "seconds":
        scale, name = next(((s, n) for s, n in reversed(_TIMES) if abs(value) >= s), _TIMES[0])
        return f"{_three_digits(value / scale)} {name}"
    if unit in _UNITS:
        base, names = _UNITS[unit]
        power = 0
        while abs(value) >= base * (1 - 1e-9) and power < len(names) - 1:
            value, power = value / base, power + 1
        return f"{_three_digits(value)} {names[power]}"
    if unit == "share":
        return "under 0.001%" if 0 < value < 5e-6 else f"{100 * value:.3g}%"
    if unit == "times":
        return f"{value:,.0f}×" if value >= 9.95 else f"{value:.2g}×"
    is_whole = isinstance(value, Integral) or 1000 <= abs(value) < 1e9
    return f"{value:,.0f} {unit}".rstrip() if is_whole else f"{value:.4g} {unit}".rstrip()


def _three_digits(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


@checked
def short(value: float, unit: str) -> str:
    """`in_words` for axis ticks: no trailing zeros.

    Args:
        value: the number, in the base unit.
        unit: as in `in_words`.

    Returns:
        For example `"1 ms"` or `"32k"` for a number of tokens.

    Example:
        >>> short(0.001, "seconds"), short(32 * 1024, "tokens")
        ('1 ms', '32k')
    """
    if unit == "tokens":
        for scale, suffix in ((1 << 20, "M"), (1 << 10, "k")):
            if value >= scale:
                return f"{value / scale:g}{suffix}"
        return f"{value:g}"
    if unit == "seconds" and value >= 1:
        return f"{value:,.0f} s"
    number, _, name = in_words(value, unit).partition(" ")
    return f"{float(number.replace(',', '')):g} {name}"


def counted(count: int, what: str) -> str:
    """A number of things: `"1 token"`, `"12 tokens"`."""
    return f"{count:,} {what}" + ("" if count == 1 else "s")
