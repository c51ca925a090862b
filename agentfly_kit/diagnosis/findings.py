"""`Finding` and `Findings`, the results of `diagnose`."""

from __future__ import annotations

from dataclasses import dataclass

from agentfly_kit._display import Displayable, printable

# A finding is serious if its `effect` is at least this value.
_SERIOUS = 0.5


@dataclass(frozen=True)
class Finding(Displayable):
    """A possible reason why the policy does not learn.

    Attributes:
        name: Identifier of the check, such as "unparsed_calls".
        sentence: Description of the finding, with numbers.
        number: The number on which the finding is based, usually a fraction.
        remedy: Advice on what to do about it.
        widget: Expression that shows the evidence in a notebook, where `w` is `af.widgets`.
        effect: Estimated fraction of the training signal that is lost or wrong, from 0 to 1.
    """

    name: str
    sentence: str
    number: float
    remedy: str
    widget: str
    effect: float

    @property
    def serious(self) -> bool:
        """True if `effect` is at least 0.5."""
        return self.effect >= _SERIOUS

    def __repr__(self) -> str:
        return printable(f"{self.name}: {self.sentence} {self.remedy} See {self.widget}.")


class Findings(tuple[Finding, ...], Displayable):
    """Findings of `diagnose`: serious causes first, then serious symptoms of other causes, then all others."""

    __slots__ = ()

    @property
    def serious(self) -> Findings:
        return Findings(finding for finding in self if finding.serious)

    def __repr__(self) -> str:
        more = [f"and {len(self) - 8} more"] if len(self) > 8 else []
        return "\n".join([*map(repr, self[:8]), *more]) if self else "nothing was found"
