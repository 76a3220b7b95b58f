"""Colors of the series of pictures and pages."""

# Okabe and Ito's palette, for color-blind readers; some colors are darker here, so that text stays legible
SERIES = ("#0072b2", "#d55e00", "#009e73", "#a8578a", "#b87a00", "#2f8fc4", "#7a6a53", "#5b4fa3", "#5d7f2a")
# below them: weights, optimizer, gradients
GREYS = ("#6f6f6f", "#9a9a9a", "#c4c4c4")
