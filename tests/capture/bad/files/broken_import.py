import a_package_that_is_not_there  # HERE
