"""The effect of payload errors on gradients: measured while training runs, compared with batch noise."""
