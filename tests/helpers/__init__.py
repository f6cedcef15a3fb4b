"""What tests of several folders share: models, devices and tiers to test on, and meters. No test lives here."""
