WIDTH = int("eight")  # HERE
