"""The loops of a model: how many there are, what differs between them, which one ends the work.

rows.py       the parameters that each loop has of its own, and the program that runs over them
depth.py      the number of loops, drawn in training and chosen afterwards
windows.py    attention windows that differ from loop to loop
injection.py  the prelude's output as an input of every loop
exits.py      the gate that says after which loop to stop
"""
