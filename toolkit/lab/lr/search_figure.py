"""The four plots of a round of a search in one figure."""

from matplotlib.artist import Artist
from matplotlib.figure import Figure

from toolkit.lab.lr.search_plots import CandidatePlot, LandscapePlot
from toolkit.lab.lr.search_rounds import Settings
from toolkit.lab.lr.search_view import SearchView
from toolkit.lab.lr.spending_plots import LedgerPlot, SchedulePlot


class SearchFigure:
    """Candidates, loss against rate, schedule and ledger of one round.

    Attributes:
        candidates, landscape, schedule, ledger: the plots.
    """

    def __init__(self, figure: Figure) -> None:
        grid = figure.add_gridspec(
            2, 2, left=0.085, right=0.97, top=0.95, bottom=0.155, wspace=0.2, hspace=0.5
        )
        below = grid[1, 1].subgridspec(2, 1, height_ratios=(0.5, 1), hspace=0.62)
        right = [figure.add_subplot(below[row]) for row in range(2)]
        for axes in right:  # room for the names beside the losses
            box = axes.get_position()
            axes.set_position((box.x0 + 0.045, box.y0, box.width - 0.045, box.height))
        self.candidates = CandidatePlot(figure.add_subplot(grid[0, 0]))
        self.landscape = LandscapePlot(figure.add_subplot(grid[0, 1]))
        self.schedule = SchedulePlot(figure.add_subplot(grid[1, 0]))
        self.ledger = LedgerPlot(*right)
        self._source = figure.text(0.085, 0.012, "", fontsize=9)
        self._settings: Settings | None = None

    def artists(self) -> list[Artist]:
        """What moves, lowest first."""
        plots = (self.candidates, self.landscape, self.schedule, self.ledger)
        return [artist for plot in plots for artist in plot.artists()]

    def show(self, view: SearchView) -> bool:
        """Move everything to a round.

        Args:
            view: of the round.

        Returns:
            Whether it is of another search, so that the background is to be drawn again.

        Cost:
            A few milliseconds.
        """
        is_another, self._settings = view.settings != self._settings, view.settings
        if is_another:
            self._source.set_text(
                f"Losses: {view.provenance}. Known schedules: found beforehand. Red: new in this "
                "round.\nBars and bands: two standard deviations. On an edge: beyond the plot."
            )
            for plot in (self.landscape, self.schedule, self.ledger):
                plot.name(view)
        for plot in (self.candidates, self.landscape, self.schedule, self.ledger):
            plot.show(view)
        return is_another
