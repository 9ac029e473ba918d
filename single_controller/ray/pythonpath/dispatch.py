from _single_controller_stand_in import load  # type: ignore[import-not-found]

load(__name__)
