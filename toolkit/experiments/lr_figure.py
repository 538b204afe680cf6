"""placeholder"""
def draw(found, caption):
    from toolkit.lab.figures import new_figure
    return new_figure(4,3)
