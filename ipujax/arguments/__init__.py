"""Settings that name arguments of a function, checks of arguments, and the names of functions; no compiler."""

from ipujax.arguments.arguments import (
    argument_places as argument_places,
    as_numbers as as_numbers,
    by_position as by_position,
    check_arguments as check_arguments,
    check_function as check_function,
    check_optimizer as check_optimizer,
    check_settings as check_settings,
    donated_places as donated_places,
    dynamic_arguments as dynamic_arguments,
    floating_dtype as floating_dtype,
    function_name as function_name,
    has_tracer as has_tracer,
    own_check as own_check,
    short_type as short_type,
    shown_array as shown_array,
    static_keywords as static_keywords,
    whole_number as whole_number,
)
from ipujax.arguments.jax_settings import FunctionName as FunctionName, settings_of_jax as settings_of_jax
