-- Written by gpufleet; the next deploy overwrites what is changed here.
--
-- The action lua.form_model sets txn.asked to the model that a form (multipart/form-data, RFC 7578)
-- names: the value of its first field `model`, wherever that stands in what HAProxy keeps of the
-- body. Without such a field txn.asked stays unset.
--
-- In Lua, for HAProxy's own converters end at a body's first zero byte, and audio is full of them.

-- A form of speech has ten fields. What a client sends is bounded before anything is done with it.
local MOST_FIELDS = 64
local MOST_HEAD = 2048
local MOST_NAME = 256
local MOST_BOUNDARY = 70 -- RFC 2046, section 5.1.1

local function parameter(header, name)
    local first, last = header:lower():find("[;%s]" .. name .. "%s*=%s*")
    if not first then
        return nil
    end
    return header:match('^"([^"]*)"', last + 1) or header:match('^[^%s;"]+', last + 1)
end

local function field_name(head)
    for line in head:gmatch("[^\r\n]+") do
        if line:lower():find("^content%-disposition%s*:") then
            return parameter(line, "name")
        end
    end
    return nil
end

local function model_of(body, boundary)
    -- A body begins with a boundary, which has no line's end before it.
    local delimiter = "--" .. boundary
    local at = 1
    if body:sub(1, #delimiter) ~= delimiter then
        delimiter = "\r\n" .. delimiter
        at = body:find(delimiter, 1, true)
    end
    if not at then
        return nil
    end
    local head_begins = at + #delimiter
    delimiter = "\r\n--" .. boundary
    for _ = 1, MOST_FIELDS do
        local head_ends, value_begins = body:sub(head_begins, head_begins + MOST_HEAD):find("\r\n\r\n", 1, true)
        if not head_ends then
            return nil
        end
        local head = body:sub(head_begins, head_begins + head_ends - 1)
        value_begins = head_begins + value_begins
        local value_ends = body:find(delimiter, value_begins, true)
        if not value_ends then
            return nil -- the rest of it is not here yet
        end
        if field_name(head) == "model" then
            local value = body:sub(value_begins, value_ends - 1)
            local is_name = #value >= 1 and #value <= MOST_NAME and not value:find("%c")
            return is_name and value or nil
        end
        head_begins = value_ends + #delimiter
    end
    return nil
end

core.register_action("form_model", { "http-req" }, function(txn)
    local boundary = parameter(txn.f:req_hdr("content-type") or "", "boundary")
    if boundary and #boundary >= 1 and #boundary <= MOST_BOUNDARY then
        local model = model_of(txn.f:req_body() or "", boundary)
        if model then
            txn:set_var("txn.asked", model)
        end
    end
end, 0)
