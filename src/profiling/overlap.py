"""How much of a step's communication its computation hides, from measured times, and how sure that is."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

#: From so many samples on, how many (distances between their quartiles / sqrt(number)) the median of that many draws
#: from a normal distribution lies from the true one at most, in 19 of 20 cases. For many it is 1.96 * 1.2533 / 1.349;
#: few say little of their own scatter, and where the quartiles are samples themselves (5, 9, ...) less than one fewer.
#: Found by 400,000 draws of each number, the largest of those up to the next. Quartiles, since one slow sample must not
#: make all the others worthless.
ERRORS_OF_QUARTILES = {
    **{2: 18.0, 3: 4.64, 4: 3.69, 5: 4.72, 6: 3.21, 7: 2.8},
    **{10: 2.46, 14: 2.24, 18: 2.14, 26: 2.06, 40: 1.97, 100: 1.89},
}


@dataclass(frozen=True)
class Estimate:
    """A median of timings, in seconds. noise: within so much of it the true one lies, in 19 of 20 cases."""

    seconds: float
    noise_seconds: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Estimate":
        """samples: at least two, in seconds."""
        low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
        known = max(number for number in ERRORS_OF_QUARTILES if number <= len(samples))
        return cls(middle, ERRORS_OF_QUARTILES[known] * (high - low) / len(samples) ** 0.5)

    @property
    def is_measurable(self) -> bool:
        return self.seconds > self.noise_seconds


@dataclass(frozen=True)
class Overlap:
    """exposed: what communication adds to a step. communication: what it takes with nothing beside it."""

    exposed: Estimate
    communication: Estimate

    @property
    def is_measurable(self) -> bool:
        """Whether there is a number: communication stands out of the noise, and is not all uncertainty."""
        noise = self.exposed.noise_seconds + self.communication.noise_seconds
        return self.communication.seconds > noise

    @property
    def hidden_fraction(self) -> float | None:
        """1 - exposed / communication, 0 ... 1; None where it is not measurable.

        Cut to that range: communication beside computation may cost more than alone, as both want the same cores and
        memory; and of what costs nothing the noise may say that it costs less than that.
        """
        if not self.is_measurable:
            return None
        return min(1.0, max(0.0, 1.0 - self.exposed.seconds / self.communication.seconds))

    @property
    def hidden_seconds(self) -> float | None:
        fraction = self.hidden_fraction
        return None if fraction is None else fraction * self.communication.seconds

    @property
    def noise_fraction(self) -> float | None:
        """What `hidden_fraction` may be off by; None where that is."""
        if not self.is_measurable:
            return None
        return (self.exposed.noise_seconds + self.communication.noise_seconds) / self.communication.seconds

    def in_words(self) -> str:
        """The finding in a line."""
        fraction, noise, alone = self.hidden_fraction, self.noise_fraction, f"{milliseconds(self.communication)} alone"
        if fraction is None or noise is None:
            return (
                f"not measurable here: communication takes {alone}, and what it adds to a step,"
                f" {milliseconds(self.exposed)}, scatters as much"
            )
        if not self.exposed.is_measurable:
            return f"at least {max(0.0, fraction - noise):.0%} ({alone}; what it adds to a step is below the noise)"
        if self.exposed.seconds > self.communication.seconds:
            return f"0 % ({alone}; beside the computation it adds {milliseconds(self.exposed)}, which is more)"
        return (
            f"{100 * fraction:.0f} ± {100 * noise:.0f} % ({1e3 * fraction * self.communication.seconds:.1f} of {alone})"
        )


def milliseconds(estimate: Estimate) -> str:
    return f"{1e3 * estimate.seconds:.1f} ± {1e3 * estimate.noise_seconds:.1f} ms"
