"""@register: the method is unchanged, and its declaration is found through inheritance and decorators."""

import functools
import inspect
import pickle

import pytest

import single_controller
import workers
from dispatch import Dispatch, DispatchError, Execute, ResultError, SingleControllerError, register
from dispatch.register import UNREGISTERED, Registration, method_spec, registered_methods


class Base:
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def add(self, x: int, *, times: int = 1) -> int:
        """Add x."""
        return x * times

    @register(Dispatch.DP_COMPUTE_PROTO, Execute.ALL, False, uneven="pad", inputs="view", concurrent=True)
    async def generate(self, prompts, temperature=1.0):
        """Generate."""
        return prompts

    @staticmethod
    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def double(x):
        return 2 * x

    @classmethod
    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def name(cls, suffix=""):
        return cls.__name__ + suffix

    @property
    def broken(self):
        raise AssertionError("finding the methods must not run a property")

    @functools.cached_property
    def broken_too(self):
        raise AssertionError("finding the methods must not run a property")

    limit = 3

    def plain(self, x):
        return x


def mode_of(cls, name):
    return registered_methods(cls)[name].registration.mode


class TestMethod:
    def test_is_returned_unchanged(self):
        def work(self, x: int, y: str = "a", *rest, key=None, **more) -> float:
            """Work."""

        signature, name = inspect.signature(work), work.__qualname__
        decorated = register(dispatch_mode=Dispatch.ONE_TO_ALL)(work)
        assert decorated is work
        assert inspect.signature(decorated) == signature
        assert (decorated.__doc__, decorated.__qualname__) == ("Work.", name)


class TestDeclaration:
    def test_every_option_is_kept(self):
        assert registered_methods(Base)["generate"].registration == Registration(
            mode=Dispatch.DP_COMPUTE_PROTO,
            execute=Execute.ALL,
            blocking=False,
            materialize_futures=True,
            uneven="pad",
            inputs="view",
            concurrent=True,
        )

    def test_defaults(self):
        class Worker:
            @register()
            def work(self): ...

        assert registered_methods(Worker)["work"].registration == Registration(
            mode=Dispatch.ALL_TO_ALL,
            execute=Execute.ALL,
            blocking=True,
            materialize_futures=True,
            uneven="error",
            inputs="copy",
            concurrent=False,
        )

    def test_first_four_options_are_positional(self):
        @register(Dispatch.ONE_TO_ALL, Execute.RANK_ZERO, False, False)
        def work(self): ...

        registration = registered_methods(type("W", (), {"work": work}))["work"].registration
        assert registration == Registration(Dispatch.ONE_TO_ALL, Execute.RANK_ZERO, False, False)

    @pytest.mark.parametrize(
        "options", [{"uneven": "drop"}, {"uneven": None}, {"inputs": "alias"}, {"uneven": ["pad"]}]
    )
    def test_unknown_choice_error_lists_the_known_choices(self, options):
        (name,) = options
        with pytest.raises(ValueError, match=f"register\\({name}=.*known are '"):
            register(**options)

    @pytest.mark.parametrize(
        ("mode", "execute"),
        [("ONE_TO_ALL", "ALL"), ("ALL_TO_ALL", "ALL"), ("MEGATRON_COMPUTE", "ALL"), ("DP_COMPUTE_PROTO", "RANK_ZERO")],
    )
    def test_uneven_is_refused_where_no_batch_is_cut(self, mode, execute):
        with pytest.raises(
            ValueError, match=rf"register\(uneven='pad'\): Dispatch.{mode} with Execute.{execute} cuts no"
        ):
            register(mode, execute, uneven="pad")
        register(mode, execute, uneven="error")

    def test_uneven_is_accepted_where_a_function_may_cut(self):
        register(
            {"dispatch_fn": lambda group, *args: (args, {}), "collect_fn": lambda group, results: results}, uneven="pad"
        )

    @pytest.mark.parametrize("name", ["blocking", "materialize_futures", "concurrent"])
    @pytest.mark.parametrize("value", [1, None, "yes"])
    def test_flags_must_be_bools(self, name, value):
        with pytest.raises(TypeError, match=f"register\\({name}=...\\) is True or False"):
            register(**{name: value})

    def test_missing_parentheses(self):
        with pytest.raises(TypeError, match="parentheses"):

            @register
            def work(self): ...

    @pytest.mark.parametrize("thing", [3, "work", Base, functools.partial(print), property(lambda self: 1), len])
    def test_only_functions_can_be_decorated(self, thing):
        with pytest.raises(TypeError, match="decorates a method"):
            register()(thing)

    def test_register_above_staticmethod_error_says_where_to_put_it(self):
        with pytest.raises(TypeError, match="below @staticmethod"):
            register()(staticmethod(lambda x: x))


class TestRegisteredMethods:
    def test_all_kinds_are_found_in_order_without_running_properties(self):
        assert list(registered_methods(Base)) == ["add", "generate", "double", "name"]

    def test_owner_and_name(self):
        spec = registered_methods(Base)["add"]
        assert (spec.owner, spec.name, spec.function) == ("Base", "add", Base.add)

    @pytest.mark.parametrize(
        ("name", "signature"),
        [
            ("add", "(x: int, *, times: int = 1) -> int"),
            ("generate", "(prompts, temperature=1.0)"),
            ("double", "(x)"),
            ("name", "(suffix='')"),
        ],
    )
    def test_signature_omits_self(self, name, signature):
        assert str(registered_methods(Base)[name].signature) == signature

    def test_method_spec_of_an_unregistered_method(self):
        spec = method_spec(Base, "plain")
        assert spec.registration is UNREGISTERED
        assert str(spec.signature) == "(x)"
        assert spec.registration.mode == Dispatch.ONE_TO_ALL

    @pytest.mark.parametrize("name", ["limit", "broken", "broken_too", "nothing", "__class__"])
    def test_method_spec_of_other_attributes_is_none(self, name):
        assert method_spec(Base, name) is None

    def test_wrapping_decorator_keeps_the_declaration(self):
        def logged(function):
            @functools.wraps(function)
            def inner(*args, **kwargs):
                return function(*args, **kwargs)

            return inner

        class Worker:
            @logged
            @register(dispatch_mode="ONE_TO_ALL")
            def work(self, x): ...

        spec = registered_methods(Worker)["work"]
        assert spec.registration.mode == Dispatch.ONE_TO_ALL
        assert str(spec.signature) == "(x)"

    def test_wrapper_without_a_signature_takes_positional_arguments(self):
        """verl's GPUMemoryLogger, for example, is a decorator without functools.wraps."""

        def logged(function):
            def inner(*args, **kwargs):
                return function(*args, **kwargs)

            return inner

        class Worker:
            @register(dispatch_mode="ONE_TO_ALL")
            @logged
            def work(self, x): ...

        assert str(registered_methods(Worker)["work"].signature) == "(*args, **kwargs)"


class TestSubclasses:
    def test_methods_are_inherited(self):
        class Sub(Base):
            @register()
            def more(self): ...

        assert list(registered_methods(Sub)) == ["add", "generate", "double", "name", "more"]
        assert registered_methods(Sub)["add"].owner == "Sub"

    def test_override_keeps_the_declaration_with_its_own_signature(self):
        class Sub(Base):
            def add(self, x, y):
                return x + y

            async def generate(self, prompts):
                return prompts

            @staticmethod
            def double(x):
                return x + x

            @classmethod
            def name(cls, suffix=""):
                return suffix

        for name, spec in registered_methods(Base).items():
            assert registered_methods(Sub)[name].registration == spec.registration
        assert str(registered_methods(Sub)["add"].signature) == "(x, y)"
        assert registered_methods(Sub)["add"].function is Sub.add

    def test_override_with_register_replaces_the_whole_declaration(self):
        class Sub(Base):
            @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
            async def generate(self, prompts): ...

        assert registered_methods(Sub)["generate"].registration == Registration(Dispatch.DP_COMPUTE_METRIC)
        assert mode_of(Base, "generate") == Dispatch.DP_COMPUTE_PROTO

    def test_nearest_declaration_wins(self):
        class Middle(Base):
            @register(dispatch_mode=Dispatch.RANK_ZERO)
            def add(self, x): ...

        class Leaf(Middle):
            def add(self, x): ...

        assert mode_of(Leaf, "add") == Dispatch.RANK_ZERO

    def test_mixins_follow_the_method_resolution_order(self):
        class Mixin:
            @register(dispatch_mode=Dispatch.DP_COMPUTE)
            def add(self, x): ...

        assert mode_of(type("A", (Mixin, Base), {}), "add") == Dispatch.DP_COMPUTE
        assert mode_of(type("B", (Base, Mixin), {}), "add") == Dispatch.ONE_TO_ALL

    def test_method_set_to_none_is_removed(self):
        class Sub(Base):
            add = None

        assert "add" not in registered_methods(Sub)


class TestBinding:
    def test_parameters_are_named_by_position_and_keyword(self):
        class Worker:
            @register()
            def work(self, a, b=1, *rest, key=None, **more): ...

        spec = registered_methods(Worker)["work"]
        assert [spec.parameter(slot) for slot in (0, 1, 2, 3)] == ["a", "b", "*rest[0]", "*rest[1]"]
        assert [spec.parameter(slot) for slot in ("key", "other")] == ["key", "other"]


class TestErrors:
    @pytest.mark.parametrize(
        ("error", "attributes"),
        [
            (DispatchError("text", method="m", argument="x"), {"method": "m", "argument": "x"}),
            (DispatchError("text"), {"method": None, "argument": None}),
            (ResultError("text", method="m"), {"method": "m"}),
            (SingleControllerError("text"), {}),
        ],
    )
    def test_errors_pickle_with_their_attributes(self, error, attributes):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert str(again) == "text"
        assert {name: getattr(again, name) for name in attributes} == attributes

    def test_all_errors_have_one_base_class(self):
        assert issubclass(DispatchError, SingleControllerError)
        assert issubclass(DispatchError, ValueError)
        assert issubclass(ResultError, SingleControllerError)


def test_misspelt_keyword_of_each_public_class():
    made = [getattr(package, name) for package in (single_controller, workers) for name in package.__all__]
    for cls in made:
        if not isinstance(cls, type) or issubclass(cls, BaseException):
            continue
        parameters = inspect.signature(cls.__init__).parameters
        meant = max((name for name in parameters if name != "self"), key=len, default=None)
        if meant is None or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            continue  # it takes nothing, or any keyword, for another class's constructor
        if inspect.isabstract(cls):
            cls = type("Mine", (cls,), dict.fromkeys(cls.__abstractmethods__))
        wrong = meant[:1] + meant
        told = rf"^{cls.__name__}\(\) got an unexpected keyword argument '{wrong}'; (did you mean|known are) .*{meant}"
        with pytest.raises(TypeError, match=told):
            cls.__init__(object.__new__(cls), **{wrong: 1})  # Megatron's classes need CUDA before that


def test_options_that_are_no_arguments_are_all_options():
    from dispatch.register import CALL_OPTIONS
    from single_controller.call.group import RemoteMethod

    assert ["self", *CALL_OPTIONS] == list(inspect.signature(RemoteMethod.options).parameters)


def test_argument_that_has_the_name_of_an_option_reaches_the_method():
    class Waits(single_controller.Worker):
        @register(Dispatch.ONE_TO_ALL)
        def wait(self, timeout):
            return timeout

    with single_controller.LocalWorkerGroup(1, single_controller.ClassWithInitArgs(Waits)) as group:
        assert group.wait(timeout=3) == [3]


def test_constructor_keeps_its_signature_and_its_own_errors():
    assert "max_new_tokens" in inspect.signature(workers.SamplingParams).parameters
    with pytest.raises(TypeError, match=r"multiple values for argument 'max_new_tokens'"):
        workers.SamplingParams(1, max_new_tokens=1)

    class Mine(workers.SampleBuffer):
        def __init__(self, groups, **others):
            super().__init__(groups, **others)

    assert Mine(4, window=3, order="window").window == 3
    with pytest.raises(TypeError, match=r"Mine\(\) got an unexpected .* 'windo'; did you mean 'window'"):
        Mine(4, windo=3)
