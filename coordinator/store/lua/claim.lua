-- ARGV: a Claim (msgpack) of coordinator.store.store, hashes of prefixes (16 bytes each), their other holders (a line each).
-- Of the routes offered, the cheapest by fresh counts that its workers still take is reserved. No formula is here, and no constant: a cost is a sum of the claim's coefficients.
--
-- Returns {word, ...}: ok rows route | refused rows | again prefill_info decode_info | gone side | stale
local claim = cmsgpack.unpack(ARGV[1])
local id, epoch = claim.request_id, claim.epoch
local request = read(key('req:', id))

local function repeated()
  local infos = {}
  for i, side in ipairs({'prefill', 'decode'}) do
    local row = redis.call('HMGET', key('node:', request[side]), 'info', 'term')
    if not row[1] or row[2] ~= request[side .. '_term'] then return {'gone', side} end
    infos[i] = row[1]
  end
  return {'again', infos[1], infos[2]}
end

-- Its gateway knows better, and Redis was away for longer than a lease: it begins anew, and stays counted as it ended.
if request.reaped and request.gateway == claim.gateway_id and tonumber(request.epoch) < epoch then
  redis.call('DEL', key('req:', id))
  request = {}
end
if request.state then
  local at = tonumber(request.epoch)
  if at == epoch and not ENDS[request.state] and request.gateway == claim.gateway_id then return repeated() end
  if at >= epoch or ENDS[request.state] then
    count('stale')
    return {'stale'}
  end
  -- The former attempt's credits go back whatever comes of this one; a refusal leaves the rest for its gateway to end.
  drop_destination(id, request)
  drop_prefill(id, request)
  drop_decode(id, request)
end

local rows, workers = {}, {}
for i, offered in ipairs(claim.workers) do
  local row = redis.call('HMGET', key('node:', offered[1]), unpack(ROW))
  rows[i] = joined(row)
  if row[1] == offered[2] and tonumber(row[2]) > NOW_MS and row[3] == '0' then
    local pending, reserved = math.max(0, row[4] + row[5]), row[6] + row[7]
    workers[i] = {
      pending = pending, decodes = tonumber(row[8]), answers = tonumber(row[9]),
      over = math.max(0, reserved + claim.need_tokens - offered[3]),
      computes = pending <= offered[4], answers_more = reserved == 0 or reserved <= offered[5],
    }
  end
end

local function cost(per, worker)
  return per[1] * worker.pending + per[2] * worker.decodes + per[3] * worker.over + per[4] * worker.answers
end

local best, least
for i, route in ipairs(claim.routes) do
  local p, d = workers[route[1] + 1], workers[route[2] + 1]
  if p and d and p.computes and d.answers_more then
    local total = route[4] + cost(route[5], p) + cost(route[6], d)
    if not least or total < least then best, least = i, total end
  end
end
if not best then
  if claim.refusal ~= '' then count(claim.refusal) end
  return {'refused', table.concat(rows, '\n')}
end

local route = claim.routes[best]
local prefill, decode = claim.workers[route[1] + 1], claim.workers[route[2] + 1]
redis.call('HSET', key('req:', id), 'gateway', claim.gateway_id, 'prefill', prefill[1], 'prefill_term', prefill[2],
  'prefill_tokens', route[3], 'prefill_held', '1', 'decode', decode[1], 'decode_term', decode[2],
  'decode_tokens', claim.need_tokens, 'decode_held', '1', 'state', 'PLACED', 'epoch', epoch)
if request.state then redis.call('HINCRBY', key('states'), request.state, -1) end
redis.call('HINCRBY', key('states'), 'PLACED', 1)
redis.call('ZADD', key('leases'), NOW_MS + claim.lease_ms, id)
count('placed')

local node = key('node:', prefill[1])
redis.call('HINCRBY', node, 'pending', route[3])
redis.call('HINCRBY', node, 'prefills', 1)
local tail = ':' .. claim.prefix_tail
local holders = prefill[2] .. ':' .. redis.call('HINCRBY', node, 'served', claim.num_blocks) .. tail
node = key('node:', decode[1])
redis.call('HINCRBY', node, 'reserved', claim.need_tokens)
redis.call('HINCRBY', node, 'decodes', 1)
touch(prefill[1])
if decode[1] ~= prefill[1] then
  holders = holders .. ' ' .. decode[2] .. ':' .. redis.call('HINCRBY', node, 'served', claim.num_blocks) .. tail
  touch(decode[1])
end
local first = 1
for others in string.gmatch(ARGV[3], '([^\n]*)\n') do
  local hash = string.sub(ARGV[2], first, first + 15)
  redis.call('SET', PREFIX .. 'prefix:' .. hash, holders .. others, 'PX', claim.prefix_kept_ms)
  first = first + 16
end
return {'ok', table.concat(rows, '\n'), best - 1}
