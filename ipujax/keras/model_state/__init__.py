"""State that models have beside Keras' own: settings for IPUs, profiles, names of variables."""
