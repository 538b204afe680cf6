"""How the room's functions are run: as one program, over cores and meshes, with derivatives of any
order, in the precision and on the platform that they are for."""
